"""Ways to move a payload's bytes; each stands alone and is chosen by name through the registry."""
