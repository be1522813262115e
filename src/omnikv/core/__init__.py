"""What a handoff decides, as pure values: no torch, no clock, no sockets, no threads."""
