"""TODO map of rpc."""
