"""TODO map of estimate."""
