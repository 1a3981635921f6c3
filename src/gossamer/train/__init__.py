"""Training: one attached model, its gradients and parameters on their way through the recipe.

session/           hooks, checks and checkpoints of one attached model
synchronizers/     for each strategy, when tensors are sent and applied
engine/            flat buckets, their reduction, reports of a step
parameter_server/  shards, update policies, journals, and the workers' half in `client`
world_state.py     this worker's rank among all workers, and its shards; gossamer.World shows a part of it
traffic/           the bytes that a step sends, by the recipe's own algorithms over meta tensors
moments/           momentum and variance of the optimizer when a compressor shares its work
auto/              the next recipe, from the numbers of all ranks
checkpoint/        checkpoints: manifests, parts, resharding
sampler/           the shard of the data that a worker gets
sharding/          models of which a rank holds a part: FSDP2, tensor parallelism
parallel/          layers on several workers: pipeline boundaries, remote modules
"""
