"""Shared by gossamer.horovod.keras and gossamer.horovod.tensorflow.keras: calls of values, loading of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gossamer.horovod import basics
from gossamer.horovod.basics import *  # noqa: F403 - the names of every framework
from gossamer.horovod.basics import Average, reduction
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.tensorflow import ops, scattering
from gossamer.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    join,
)
from gossamer.horovod.tensorflow.ops import Compression
from gossamer.horovod.tensorflow.optimizer import DistributedOptimizer
from gossamer.horovod.tensorflow.tape import local_variables

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "join",
    "reducescatter",
]
__all__ += basics.__all__


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
    """The reduction of a value over the ranks, a tensor: see gossamer.horovod.tensorflow.allreduce.

    Args:
        value: a tensor or array of the same shape on every rank.
        name: matches calls of different ranks; without one they are matched by their order.
        average: former argument; False means op=Sum.
        prescale_factor, postscale_factor: factors before and after the reduction.
        op: Average (default), Sum, Min, Max or Product.
        compression: Compression.fp16 sends float16.
    """
    return ops.allreduce(
        value,
        compression=compression,
        op=op or reduction(None, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The values of all ranks, concatenated along the first dimension.

    Args:
        value: a tensor or array; only its first dimension may differ between ranks.
        name: matches calls of different ranks; without one they are matched by their order.
    """
    return ops.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of rank `root_rank`, on every rank.

    Args:
        value: a tensor or array of the same shape on every rank.
        root_rank: rank in the job whose value is used.
        name: matches calls of different ranks; without one they are matched by their order.
    """
    return ops.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReductionOp = Average) -> Any:
    """Reduce a value over the ranks; each rank receives its rows of the result.

    Args:
        value: a tensor or array of the same shape on every rank.
        name: matches calls of different ranks; without one they are matched by their order.
        op: Average (default) or Sum.
    """
    return scattering.reducescatter(value, op=op, name=name)


def model_loader(keras: Any) -> Callable[..., Any]:
    """`load_model` of a front end whose models are those of the package `keras`."""

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
        named = {each.__name__: each for each in custom_optimizers or ()}
        model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        return model

    return load_model
