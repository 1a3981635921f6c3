"""Virtual federation: one server script and up to many thousand devices in virtual time, with real training.

simulate             simulate: runs a federation on this machine
engine               VirtualFederation: an event queue; only chosen devices have a live script
hours                when a device of such hours is there
device_states        what devices keep, in memory or on disk; equal replicas are kept once
training             how a round's devices are trained: one after another
vectorized_training  many devices of a round in one vmapped call
training_choice      which of these two
ray_training         many devices of a round as tasks of Ray
seeding              seeds of torch, random and numpy, for every device and round
federated_run        FederatedRun: rounds, bytes, virtual seconds, metrics
"""
