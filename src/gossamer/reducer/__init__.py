"""TODO map of reducer."""
