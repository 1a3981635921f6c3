"""Federated client: runs on a device, from the user's training function to the compressed contribution.

functions       the user's functions of a script; Round, Update and SGDSteps
local_training  runs the user's loop: counts steps, corrects gradients for the strategy, rejects unsupported loops
contribution    compresses an update with error feedback, for the server
store           state of a device between rounds, in memory or on disk
script          the device's script: pull a task, train, push the contribution, wait for its receipt
"""
