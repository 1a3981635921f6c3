"""The public names of Horovod 0.28.1, by module: those that a script of its documentation may use.

Names of functions that its modules import for themselves, such as check_extension, are not in the table.
"""

from __future__ import annotations

from types import ModuleType


def words(text: str) -> set[str]:
    return set(text.split())


SHARED = words(
    """
    Average Compression DistributedOptimizer Sum allgather allreduce broadcast ccl_built cross_rank
    cross_size cuda_built ddl_built elastic global_process_set gloo_built gloo_enabled init is_initialized
    local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank reducescatter
    rocm_built shutdown size start_timeline stop_timeline
    """
)
CALLBACKS = words(
    """
    BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback
    LearningRateWarmupCallback MetricAverageCallback
    """
)
ELASTIC = words(
    """
    CommitStateCallback KerasState TensorFlowKerasState UpdateBatchStateCallback UpdateEpochStateCallback
    run
    """
)
COMPRESSION = {"Compression", "Compressor", "FP16Compressor", "NoneCompressor"}

TORCH: dict[str, set[str]] = {
    "horovod.torch": SHARED
    | words(
        """
        Adasum HorovodInternalError Max Min ProcessSet Product SyncBatchNorm add_process_set
        allgather_async allgather_object allreduce_ allreduce_async allreduce_async_ alltoall
        alltoall_async barrier broadcast_ broadcast_async broadcast_async_ broadcast_object
        broadcast_optimizer_state broadcast_parameters grouped_allgather grouped_allgather_async
        grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
        grouped_reducescatter grouped_reducescatter_async join poll reducescatter_async
        remove_process_set sparse_allreduce_async synchronize
        """
    ),
    "horovod.torch.elastic": words(
        """
        ElasticSampler TorchState init run run_fn shutdown
        """
    ),
    "horovod.torch.compression": COMPRESSION,
}
TENSORFLOW: dict[str, set[str]] = {
    "horovod.tensorflow": SHARED
    | words(
        """
        Adasum BroadcastGlobalVariablesHook DistributedGradientTape LocalGradientAggregationHelper Max
        Min PartialDistributedGradientTape ProcessSet Product SyncBatchNormalization add_process_set
        allgather_object alltoall broadcast_ broadcast_global_variables broadcast_object
        broadcast_object_fn broadcast_variables grouped_allgather grouped_allreduce
        grouped_reducescatter is_homogeneous join local_rank_op local_size_op process_set_included_op
        rank_op remove_process_set size_op
        """
    ),
    "horovod.tensorflow.elastic": words(
        """
        HorovodInternalError ObjectState TensorFlowKerasState TensorFlowState broadcast_object
        broadcast_object_fn broadcast_variables init rank run run_fn shutdown
        """
    ),
    "horovod.tensorflow.keras": SHARED
    | words(
        """
        ProcessSet add_process_set broadcast_global_variables callbacks load_model remove_process_set
        """
    ),
    "horovod.tensorflow.keras.callbacks": CALLBACKS,
    "horovod.tensorflow.keras.elastic": ELASTIC,
    "horovod.keras": SHARED
    | words(
        """
        Adasum PartialDistributedOptimizer broadcast_global_variables callbacks load_model
        """
    ),
    "horovod.keras.callbacks": CALLBACKS,
    "horovod.keras.elastic": ELASTIC,
    "horovod.tensorflow.compression": COMPRESSION,
}
REFUSED = {  # names that raise an error with the alternative
    "horovod.tensorflow": {"BroadcastGlobalVariablesHook", "LocalGradientAggregationHelper"},
}
REFUSED_MODULES = ["horovod.mxnet", "horovod.ray", "horovod.run", "horovod.runner", "horovod.spark", "horovod.data"]


def missing(module: ModuleType, names: set[str]) -> set[str]:
    """Names that the module does not have."""
    return {name for name in names if not hasattr(module, name)}
