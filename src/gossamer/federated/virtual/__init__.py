"""Virtual federation: one server script and up to many thousand devices in virtual time, with real training.

simulate             simulate: runs a federation on this machine; FederatedRun: its rounds, bytes and metrics
engine               VirtualFederation: an event queue; only chosen devices have a live script
device_states        the state of devices, in memory or on disk; equal replicas are kept once
training             devices of a round trained one after another, each with its own seed
vectorized_training  many devices of a round in one vmapped call
ray_training         many devices of a round as tasks of Ray
"""
