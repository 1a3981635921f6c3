"""TODO map of reference."""
