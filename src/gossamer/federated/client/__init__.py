"""Federated client: a device's part, from the user's function to the contribution that it sends.

functions       the user's functions of a script; Round, Update and SGDSteps
local_training  runs the user's loop: counts steps, changes gradients as the strategy asks, refuses other loops
contribution    compresses an update with feedback, for the server
store           what a device keeps between rounds, in memory or on disk
script          the device's script: pull a task, train, push the contribution, wait for its fate
"""
