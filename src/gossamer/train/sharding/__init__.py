"""Sharding: a recipe between replicas of a model that FSDP2, tensor parallelism or pipeline stages shard.

replica_mesh  the ranks that hold the same part of the model, from one dimension of a DeviceMesh
local_shards  this rank's part of each DTensor, as a parameter that the synchronizers average; their state dicts
model_group   the ranks that hold one replica together: one norm, one decision to skip a step
"""
