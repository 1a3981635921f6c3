"""TODO map of mesh."""
