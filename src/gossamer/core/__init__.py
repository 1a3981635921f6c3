"""TODO map of core."""
