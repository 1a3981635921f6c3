"""Functions of gossamer.horovod.keras and gossamer.horovod.tensorflow.keras: optimizers, calls and loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.horovod.basics import Average, ProcessSet, global_process_set, reduction
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.tensorflow import functions, ops, scattering
from gossamer.horovod.tensorflow.ops import Compression
from gossamer.horovod.tensorflow.optimizer import distributed_optimizer
from gossamer.horovod.tensorflow.tape import local_variables
from gossamer.train.session.recipe_choice import Written


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[TensorCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReductionOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    recipe: Written = None,
) -> Any:
    """An optimizer of the same class whose steps exchange gradients first, as the recipe says.

    Under recipes that average parameters, such as DiLoCo, steps exchange those. A step with gradients that are not
    finite is skipped on all ranks. The first step gives all ranks the variables of rank 0.

    Args:
        optimizer: of Keras 3 or Keras 2. The new one shares its variables.
        name, device_dense, device_sparse: Not used.
        compression: Compression.fp16 is the recipe Dense(dtype="float16").
        sparse_as_dense: Average tf.IndexedSlices by the recipe, as dense tensors. Else their rows are gathered.
        gradient_predivide_factor: Changes rounding only in Horovod, and nothing here.
        op: Average or Sum.
        backward_passes_per_step: How many calls add up before a step.
        average_aggregated_gradients: Whether their sum is divided by their number.
        num_groups, groups: Checked; all gradients are sent together.
        process_set: The ranks that exchange.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        recipe: A recipe of Gossamer; `gossamer run --recipe` replaces it. Dense() by default.

    Raises:
        ValueError: for an object that is not a Keras optimizer, and for one that is wrapped already.
        NotImplementedError: for Adasum, and for optimizers of TensorFlow 1.
    """
    return distributed_optimizer(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        recipe=recipe,
    )


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """As `DistributedOptimizer`, with layers whose variables are not averaged.

    Args:
        args, kwargs: As for `DistributedOptimizer`.
        local_layers: A Keras layer or several.
    """
    variables = local_variables(local_layers)
    made = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in variables:
        made.register_local_var(variable)
    return made


def broadcast_global_variables(root_rank: int) -> Any:
    """See gossamer.horovod.tensorflow.broadcast_global_variables."""
    return functions.broadcast_global_variables(root_rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReductionOp | None = None,
    compression: type[TensorCompressor] = Compression.none,
) -> Any:
    """The reduction of a value over the ranks, a tensor: see gossamer.horovod.tensorflow.allreduce."""
    return ops.allreduce(
        value,
        compression=compression,
        op=op or reduction(None, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The values of all ranks, concatenated along the first dimension."""
    return ops.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of rank `root_rank`, on every rank."""
    return ops.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReductionOp = Average) -> Any:
    """Reduce a value over the ranks; each rank receives its rows of the result."""
    return scattering.reducescatter(value, op=op, name=name)


def loaded_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Sequence[type] | None,
    custom_objects: dict[str, Any] | None,
    compression: type[TensorCompressor],
) -> Any:
    """A model of a file, with its optimizer as a DistributedOptimizer. keras: the package that reads it."""
    named = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
