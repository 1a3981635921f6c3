"""Federated client: a device's part, from the user's function to the contribution that leaves.

functions       the user's functions, and what they are told (Round) and tell (Update)
metrics         what they tell beside, as plain numbers
sgd_steps       training told as batches and a loss, for many devices at once
local_training  watches the user's loop: counts steps, changes gradients as the strategy asks
contribution    compresses what was learned, with feedback, for the server
store           what a device keeps between rounds, in memory
directory_store the same on disk
script          the device's script: ask for a task, train, send, hear what became of it
delivery        sends a contribution in parts, and again what got lost
trainer         answers the script's Train by the user's function
training_check  finds a loop that trained another model, or nothing
"""
