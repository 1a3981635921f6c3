"""Host calls: collective calls of TensorFlow tensors, eagerly and in graphs.

A graph calls Python by tf.numpy_function. Calls of one tf.function run in the order of the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from torch import Tensor

from gossamer.comm.runtime.worker_scope import current_worker, enter
from gossamer.horovod.basics import ProcessSet, context
from gossamer.horovod.calls import CollectiveCall
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.train.engine.arrays import Array
from gossamer.train.session.array_exchange import array_of, tensor_of
from gossamer.train.session.keras_limits import refuse_xla

MakeCall = Callable[[tuple[Tensor, ...]], CollectiveCall]


class TensorFlowHorovodInternalError(HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A HorovodInternalError that is also the error that Horovod's operations raise in TensorFlow."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class InvalidCallError(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """A ValueError that is also the error that Horovod's operations raise in TensorFlow."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def host_call(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """The results of a function of numpy arrays as tensors of these dtypes, computed when the graph runs.

    Raises:
        AttachError: where XLA is to compile the function that is traced.
    """
    refuse_xla()
    worker = current_worker()

    def call(*arrays: Array) -> Any:
        enter(worker)  # a graph runs on threads of TensorFlow
        try:
            return function(*arrays)
        except HorovodInternalError as failure:
            raise TensorFlowHorovodInternalError(str(failure)) from failure

    if tf.executing_eagerly():
        found = call(*(each.numpy() for each in inputs))
        return [tf.convert_to_tensor(each) for each in (found if isinstance(found, list) else [found])]
    found = tf.numpy_function(call, list(inputs), list(dtypes))
    return found if isinstance(found, list) else [found]


def tensors_of(values: Sequence[Any]) -> list[Any]:
    """Raises ValueError for dtypes that do not travel."""
    tensors = [tf.convert_to_tensor(each) for each in values]
    for tensor in tensors:
        if tensor.dtype.is_complex or tensor.dtype in (tf.string, tf.resource, tf.variant):
            raise ValueError(
                f"dtype {tensor.dtype.name} is not supported: real numbers, integers and bools are. Write "
                "tf.math.real(tensor) and tf.math.imag(tensor) for complex numbers, and hvd.broadcast_object for text."
            )
    return tensors


def collective(
    kind: str,
    tensors: Sequence[Any],
    make: MakeCall,
    name: str | None,
    process_set: ProcessSet,
    shapes: Sequence[Any],
    finish: Callable[[Any], list[tuple[Tensor, Any]]] | None = None,
    more: Sequence[Any] = (),
) -> list[Any]:
    """The answer of one call, as tensors.

    Args:
        kind: of the call, for its name in a graph.
        make: Makes the call of tensors that are not written to.
        shapes: of the results, as far as they are known.
        finish: Converts the call's answer to pairs (result, array of its dtype); None: a tensor for each input.
        more: dtypes of further results.

    Raises:
        ValueError: for a process set that is not known, also while a graph is built. Where this rank is not in the set
            it is also a tf.errors.InvalidArgumentError.
    """
    context().check_known(process_set)
    name = _graph_name(kind, name, tensors)
    dtypes = [*(each.dtype for each in tensors), *more]

    def perform(*arrays: Array) -> list[Any]:
        here = context()
        try:
            handle = here.submit(make(tuple(map(tensor_of, arrays))), name, process_set)
        except ValueError as failure:
            raise InvalidCallError(str(failure)) from failure
        answer = here.synchronize(handle)
        pairs = zip(answer, arrays, strict=True) if finish is None else finish(answer)
        return [array_of(found, arrays[like] if isinstance(like, int) else like) for found, like in pairs]

    found = host_call(perform, tensors, dtypes)
    return [tf.ensure_shape(each, shape) for each, shape in zip(found, shapes, strict=True)]


def _graph_name(kind: str, name: str | None, tensors: Sequence[Any]) -> str | None:
    """Calls are matched by name; eager ones without a name by their number, those of a graph by their tensor."""
    if name is not None or tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    about = f"Horovod{kind}_{tensors[0].name}_{tensors[-1].name}"
    unique: str = graph.unique_name(re.sub("[^a-zA-Z0-9_]", "_", about))
    return unique


def differentiable(
    forward: Callable[..., list[Any]], backward: Callable[[Sequence[Any]], Sequence[Any]], tensors: Sequence[Any]
) -> list[Any]:
    """forward(*tensors), through which gradients flow. backward: gradients of the results to those of the tensors."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def function(*given: Any) -> Any:
        return forward(*given), lambda *gradients: list(backward(gradients))

    found = function(*tensors)
    return list(found) if isinstance(found, list | tuple) else [found]
