"""TODO map of client."""
