"""Start the workers of a run on this machine, show what they print, and say why they failed."""
