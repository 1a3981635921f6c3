"""TODO map of cost."""
