"""Functions of gossamer.horovod.keras and gossamer.horovod.tensorflow.keras: calls of values, loading of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.horovod.basics import Average, reduction
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.tensorflow import ops, scattering
from gossamer.horovod.tensorflow.ops import Compression
from gossamer.horovod.tensorflow.optimizer import DistributedOptimizer
from gossamer.horovod.tensorflow.tape import local_variables


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """As `DistributedOptimizer`, without averaging the variables of some layers.

    Args:
        args, kwargs: As for `DistributedOptimizer`.
        local_layers: A Keras layer or several. Their variables are not averaged.
    """
    variables = local_variables(local_layers)
    made = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in variables:
        made.register_local_var(variable)
    return made


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
