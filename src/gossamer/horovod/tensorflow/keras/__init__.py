"""Horovod's API for tf.keras, on Gossamer: `import gossamer.horovod.tensorflow.keras as hvd`.

functions  calls of values, loading of models
callbacks  broadcast, averaged metrics, learning rates
elastic    KerasState, run and the callbacks that commit
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gossamer.horovod.basics import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.exceptions import (
    HorovodInternalError,
)
from gossamer.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    join,
)
from gossamer.horovod.tensorflow.keras import (
    callbacks,
    elastic,
)
from gossamer.horovod.tensorflow.keras.functions import (
    PartialDistributedOptimizer,
    allgather,
    allreduce,
    broadcast,
    loaded_model,
    reducescatter,
)
from gossamer.horovod.tensorflow.ops import Compression
from gossamer.horovod.tensorflow.optimizer import DistributedOptimizer
from gossamer.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[TensorCompressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model, with its optimizer as a DistributedOptimizer that has the saved state.

    Args:
        filepath: The file.
        custom_optimizers: Optimizer classes of the file that Keras does not know.
        custom_objects: Other classes and functions by name.
        compression: As for DistributedOptimizer.
        legacy_opts: Not used; optimizers of each kind are loaded.
    """
    return loaded_model(tf.keras, filepath, custom_optimizers, custom_objects, compression)
