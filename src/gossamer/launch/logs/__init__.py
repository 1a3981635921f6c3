"""TODO map of logs."""
