"""A model that is not here: its tensors, the moments at which their gradients appear, and no computing."""
