"""TODO map of synchronizers."""
