"""TODO map of gossip."""
