"""Elastic training of TensorFlow variables and Keras models: TensorFlowState, TensorFlowKerasState and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import tensorflow as tf

from gossamer.horovod import elastic
from gossamer.horovod.basics import init, rank, shutdown
from gossamer.horovod.elastic import ObjectState, PartsState, State, StatePart, run_fn
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.tensorflow.functions import broadcast_object, broadcast_object_fn, broadcast_variables
from gossamer.horovod.tensorflow.optimizer import create_variables, variables_of
from gossamer.train.session.array_exchange import array_of, tensor_of

__all__ = [
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]

Result = TypeVar("Result")


class _Variables(StatePart):
    """find: Returns the variables, which an optimizer may not have yet when the state is made."""

    def __init__(self, find: Callable[[], Sequence[Any]]) -> None:
        self.find = find

    def save(self) -> None:
        self.saved = [tensor_of(each.numpy()).clone() for each in self.find()]

    def restore(self) -> None:
        for variable, saved in zip(self.find(), self.saved, strict=False):
            variable.assign(array_of(saved, variable.numpy()))

    def sync(self) -> None:
        broadcast_variables(self.find(), root_rank=0)


class TensorFlowState(PartsState):
    """State of TensorFlow variables, and of plain objects, which are attributes.

    Args:
        variables: The variables.
        session: Not used; sessions are those of TensorFlow 1.
        kwargs: As for ObjectState.

    Raises:
        ValueError: without variables.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if not variables:
            raise ValueError(
                "TensorFlowState needs variables, since eager execution has no list of all. Write "
                "hvd.elastic.TensorFlowState(model.variables)."
            )
        self.variables = variables
        super().__init__({"variables": _Variables(lambda: self.variables)}, kwargs)


class TensorFlowKerasState(PartsState):
    """State of a Keras model and its optimizer, and of plain objects, which are attributes.

    Args:
        model: A model that is built.
        optimizer: None: that which the model was compiled with.
        backend: Not used.
        kwargs: As for ObjectState.

    Raises:
        ValueError: for a model that is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer or model.optimizer
        create_variables(self.optimizer, model.trainable_variables)  # so that a commit's moments find their place
        parts = {
            "model": _Variables(lambda: self.model.variables),
            "optimizer": _Variables(lambda: variables_of(self.optimizer)),
        }
        super().__init__(parts, kwargs)


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator for a training function. Its first argument is a State; see gossamer.horovod.elastic.run_fn.

    Errors of calls within a tf.function are HorovodInternalErrors, too.

    Args:
        func: a function whose first argument is a State.
    """

    @wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.UnknownError as failure:
            _, marker, reason = str(failure.message).partition(f"{HorovodInternalError.__name__}: ")
            if not marker:
                raise
            raise HorovodInternalError(reason.partition("\n")[0]) from failure

    return elastic.run(wrapper)
