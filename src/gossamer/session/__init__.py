"""TODO map of session."""
