"""Functions on variables and objects, ranks as operations, and functions for sessions of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gossamer.horovod import exchange, objects
from gossamer.horovod.basics import ProcessSet, context, global_process_set
from gossamer.horovod.tensorflow.host import host_call
from gossamer.horovod.tensorflow.ops import broadcast_


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Assign the values of rank `root_rank` to the variables of every rank of the set, also within a tf.function.

    A tape or DistributedOptimizer that has trained some of them begins its recipe again: residuals and averages are
    about the values before.

    Args:
        variables: of the same shapes and dtypes in the same order on every rank. Those of an optimizer are
            optimizer.variables, which Keras 2 also accepts as a call.
        inplace: Not used.
    """
    variables = [getattr(each, "value", each) if _of_keras_3(each) else each for each in variables]
    if not variables:
        return None
    identities = {id(each) for each in variables}

    def restart() -> Any:
        exchange.restart_holders(identities)
        return np.zeros((), np.bool_)

    (restarted,) = host_call(restart, [], [tf.bool])
    with tf.control_dependencies([restarted]):
        found = broadcast_(variables, root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*found)


def _of_keras_3(variable: Any) -> bool:
    return isinstance(getattr(variable, "value", None), tf.Variable)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on every rank of the set; session is not used.

    Args:
        obj: numbers, text, None, bytes, arrays, and lists, tuples and dicts of them; ignored on other ranks.
        root_rank: rank in the job whose value is used.
        session: accepted for Horovod's signature, and not used.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.

    Raises:
        TypeError: for a type that does not travel, with the place of the value.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the set, by rank; session is not used. Raises TypeError as `broadcast_object`.

    Args:
        obj: as for `broadcast_object`.
        session: accepted for Horovod's signature, and not used.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.
    """
    return objects.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function of one object that returns that of rank `root_rank`; session is not used.

    Args:
        root_rank: rank in the job whose value is used.
        session: accepted for Horovod's signature, and not used.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.
    """
    return lambda obj: broadcast_object(obj, root_rank, None, name, process_set)


def join() -> Any:
    """This rank is out of data: let the others continue, until all ranks have called it.

    Returns:
        The rank that joined last, as an integer scalar.
    """
    return host_call(lambda: np.asarray(exchange.join(), np.int32), [], [tf.int32])[0]


# -- ranks as operations -----------------------------------------------------------------------------------------------


def _operation(value: Callable[[], int]) -> Any:
    return host_call(lambda: np.asarray(value(), np.int32), [], [tf.int32])[0]


def rank_op(name: str | None = None) -> Any:
    """This worker's number in the job, when a graph runs.

    Args:
        name: name of the operation in the graph.
    """
    return _operation(lambda: context().rank)


def local_rank_op(name: str | None = None) -> Any:
    """This worker's number on its machine, when a graph runs.

    Args:
        name: name of the operation in the graph.
    """
    return _operation(lambda: context().local_rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of workers in a process set, when a graph runs.

    Args:
        process_set_id: number of the set; 0 has all ranks.
        name: name of the operation in the graph.
    """
    return _operation(lambda: len(context().set_of(process_set_id).ranks))


def local_size_op(name: str | None = None) -> Any:
    """The number of workers on this machine, when a graph runs.

    Args:
        name: name of the operation in the graph.
    """
    return _operation(lambda: context().local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 where this worker is in a process set and 0 where not, when a graph runs.

    Args:
        process_set_id: number of the set; 0 has all ranks.
        name: name of the operation in the graph.
    """
    return _operation(lambda: int(context().set_of(process_set_id).included()))


# -- TensorFlow 1 ------------------------------------------------------------------------------------------------------


def broadcast_global_variables(root_rank: int) -> Any:
    """Assign the values of rank `root_rank` to all variables of a graph of TensorFlow 1.

    Args:
        root_rank: rank in the job whose value is used.

    Raises:
        RuntimeError: in eager execution, which has no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() needs a graph of TensorFlow 1; eager execution has no list of all "
            "variables. Write hvd.broadcast_variables(model.variables, root_rank=0), and the same for "
            "optimizer.variables."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)
