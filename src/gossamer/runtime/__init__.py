"""TODO map of runtime."""
