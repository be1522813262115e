"""What a handoff costs on this machine, as multiples of a plain memory copy: `python -m omnikv.bench`."""
