"""Rehearsals: workers sleep instead of computing, with a model's real tensors, and send real bytes.

model_shapes  a model's tensors, and the times in the backward pass at which their gradients are ready
model_zoo     well-known models, layer by layer
worker        the script of `gossamer rehearse`, its sleeping model, and optimizers that do almost nothing
report        rows, table and JSON
"""
