"""Rehearsals: workers that sleep where they would compute, with a model's real tensors, and send real bytes.

model_shapes     a model's tensors, and when in the backward pass their gradients appear
model_zoo        well-known models, layer by layer
layers           tensors and multiply-adds of one layer
simulated_model  the model that sleeps, and optimizers that do next to nothing
worker           the script that `gossamer rehearse` runs
report           rows, table and JSON
"""
