"""Horovod's API for torch, on Gossamer: `import gossamer.horovod.torch as hvd`.

ops              allreduce, allgather and broadcast of tensors
scattering       alltoall and reducescatter
optimizer        DistributedOptimizer, under any recipe
functions        broadcast of parameters and optimizer state
elastic          TorchState, ElasticSampler, run
sync_batch_norm  SyncBatchNorm
"""

from gossamer.horovod import basics
from gossamer.horovod.basics import *  # noqa: F403 - the names of every framework
from gossamer.horovod.basics import poll
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.exchange import join
from gossamer.horovod.objects import allgather_object, broadcast_object
from gossamer.horovod.torch import elastic
from gossamer.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from gossamer.horovod.torch.ops import (
    Compression,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from gossamer.horovod.torch.optimizer import DistributedOptimizer
from gossamer.horovod.torch.scattering import (
    alltoall,
    alltoall_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from gossamer.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += basics.__all__
