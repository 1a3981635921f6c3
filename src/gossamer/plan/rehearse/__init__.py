"""Rehearsals: workers that sleep where they would compute, with a model's real tensors, and send real bytes.

model_shapes  a model's tensors, and when in the backward pass their gradients appear
model_zoo     well-known models, layer by layer
worker        the script that `gossamer rehearse` runs, its model that sleeps, and optimizers that do next to nothing
report        rows, table and JSON
"""
