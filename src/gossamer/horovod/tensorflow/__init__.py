"""Horovod's API for TensorFlow 2, on Gossamer: `import gossamer.horovod.tensorflow as hvd`.

host             calls of Python out of graphs
ops              allreduce, allgather and broadcast of tensors
scattering       alltoall and reducescatter
exchange         variables under a recipe
tape             DistributedGradientTape
optimizer        DistributedOptimizer
functions        broadcast of variables and objects; ranks as operations; join
sync_batch_norm  SyncBatchNormalization
elastic          TensorFlowState, TensorFlowKerasState, run
callbacks        the behavior of the callbacks of both Keras packages
keras            the API of horovod.tensorflow.keras
"""

# ruff: noqa: E402 - a missing TensorFlow is explained before modules that import it

from typing import Any

try:
    import tensorflow
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "gossamer.horovod.tensorflow needs TensorFlow 2.20 or newer. Write pip install 'gossamer[tensorflow]'.",
        name=error.name,
    ) from None
del tensorflow

from gossamer.horovod import basics
from gossamer.horovod.basics import *  # noqa: F403 - the names of every framework
from gossamer.horovod.exceptions import (
    HorovodInternalError,
)
from gossamer.horovod.tensorflow import (
    elastic,
)
from gossamer.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from gossamer.horovod.tensorflow.ops import (
    Compression,
    allgather,
    allreduce,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
)
from gossamer.horovod.tensorflow.optimizer import DistributedOptimizer
from gossamer.horovod.tensorflow.scattering import (
    alltoall,
    grouped_reducescatter,
    reducescatter,
)
from gossamer.horovod.tensorflow.sync_batch_norm import (
    SyncBatchNormalization,
)
from gossamer.horovod.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += basics.__all__

UNAVAILABLE = {
    "BroadcastGlobalVariablesHook": "it belongs to estimators and sessions of TensorFlow 1. Write "
    "hvd.broadcast_variables(model.variables, root_rank=0) after the first step.",
    "LocalGradientAggregationHelper": "write hvd.DistributedOptimizer(optimizer, backward_passes_per_step=4).",
    "data": "the compute service is not available. Use tf.data with Dataset.shard(hvd.size(), hvd.rank()).",
}


def __getattr__(name: str) -> Any:
    """Explain names of Horovod that are not available."""
    if name in UNAVAILABLE:
        raise AttributeError(f"horovod.tensorflow.{name} is not available: {UNAVAILABLE[name]}")
    raise AttributeError(f"module 'gossamer.horovod.tensorflow' has no attribute {name!r}")
