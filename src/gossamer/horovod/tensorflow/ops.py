"""Allreduce, allgather and broadcast of TensorFlow tensors, eagerly and in graphs. Gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from gossamer.horovod.basics import Average, ProcessSet, Sum, context, global_process_set, reduction
from gossamer.horovod.calls import AllGatherCall, AllReduceCall, BroadcastCall, ReductionOp
from gossamer.horovod.compression import Compressors, TensorCompressor
from gossamer.horovod.tensorflow.host import (
    TensorFlowHorovodInternalError,
    collective,
    differentiable,
    tensors_of,
)


class TensorFlowHalfCompressor(TensorCompressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


Compression = Compressors(fp16=TensorFlowHalfCompressor)
Compressor, NoneCompressor, FP16Compressor = TensorCompressor, Compression.none, Compression.fp16  # Horovod's names


# -- allreduce ---------------------------------------------------------------------------------------------------------


def _reduced(
    tensors: Sequence[Any],
    name: str | None,
    op: ReductionOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Any]:
    """Gradients of a reduction are reduced in the same way."""
    if op is ReductionOp.ADASUM:
        raise NotImplementedError("Adasum is not supported. Use op=hvd.Average, with the learning rate of one worker.")
    prescale, postscale = factors

    def forward(*given: Any) -> list[Any]:
        shapes = [each.shape for each in given]
        return collective(
            "Allreduce",
            given,
            lambda arrays: AllReduceCall(tensors=arrays, op=op, prescale=prescale, postscale=postscale),
            name,
            process_set,
            shapes,
        )

    def backward(gradients: Sequence[Any]) -> list[Any]:
        return _reduced(gradients, None, op, factors, process_set)

    return differentiable(forward, backward, tensors_of(tensors))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of a tensor, variable or tf.IndexedSlices over the ranks.

    Args:
        tensor: of the same shape and dtype on every rank. The rows of tf.IndexedSlices are gathered, by Average or Sum.
        average: Former argument: False means op=Sum.
        device_dense, device_sparse, ignore_name_scope: Not used.
        compression: Compression.fp16 sends float16.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are truncated.
        prescale_factor, postscale_factor: multiplied before and after.
        name: Matches calls of different ranks. Eager calls without one are matched by their order, those of a graph by
            the name of the tensor.
        process_set: The ranks of the call.

    Raises:
        HorovodInternalError: ranks made different calls, or a rank was lost. It is also a
            tf.errors.FailedPreconditionError; a graph raises tf.errors.UnknownError with its text.
    """
    return grouped_allreduce(
        [tensor],
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        name=name,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """As `allreduce`, for several tensors at once."""
    op, factors = reduction(op, average), (prescale_factor, postscale_factor)
    slices = {place: each for place, each in enumerate(tensors) if isinstance(each, tf.IndexedSlices)}
    found: dict[int, Any] = {}
    if slices:
        gathered = _reduced_slices([*slices.values()], op, factors, process_set)
        found |= dict(zip(slices, gathered, strict=True))
    if dense := {place: each for place, each in enumerate(tensors) if place not in slices}:
        sent = [compression.compress(each) for each in tensors_of([*dense.values()])]
        reduced = _reduced([each for each, _ in sent], name, op, factors, process_set)
        for place, each, (_, ctx) in zip(dense, reduced, sent, strict=True):
            found[place] = compression.decompress(each, ctx)
    return [found[place] for place in range(len(tensors))]


def _reduced_slices(
    slices: Sequence[Any], op: ReductionOp, factors: tuple[float, float], process_set: ProcessSet
) -> list[Any]:
    if op not in (Average, Sum):
        raise NotImplementedError(
            "tf.IndexedSlices are reduced by Average and Sum. Write tf.convert_to_tensor(slices)."
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            "prescale_factor and postscale_factor need dense tensors: tf.convert_to_tensor(slices)."
        )
    parts = grouped_allgather(
        [part for each in slices for part in (each.values, each.indices)], None, False, process_set
    )
    values = parts[::2]
    if op is Average:
        values = [each / tf.cast(len(process_set.ranks), each.dtype) for each in values]
    return [
        tf.IndexedSlices(rows, indices, dense_shape=each.dense_shape)
        for each, rows, indices in zip(slices, values, parts[1::2], strict=True)
    ]


# -- allgather ---------------------------------------------------------------------------------------------------------


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """The tensors of all ranks, concatenated along the first dimension. Gradients flow through.

    Args:
        tensor: of the same dtype on every rank, and of the same size in all dimensions but the first; a scalar counts
            as one row.
        name, process_set, ignore_name_scope: As for `allreduce`.

    Raises:
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As `allgather`, for several tensors at once."""
    rows = [tf.reshape(each, [1]) if each.shape.rank == 0 else each for each in tensors_of(tensors)]
    sizes: list[Any] = []  # of each rank's rows, for the gradients

    def forward(*given: Any) -> list[Any]:
        shapes = [[None, *each.shape[1:]] if each.shape.rank is not None else None for each in given]
        *found, counts = collective(
            "Allgather",
            given,
            lambda arrays: AllGatherCall(tensors=arrays),
            name,
            process_set,
            [*shapes, [len(given), len(process_set.ranks)]],
            lambda answer: [
                *((each, place) for place, (each, _) in enumerate(answer)),
                (torch.tensor([sizes for _, sizes in answer]), np.empty(0, np.int64)),
            ],
            [tf.int64],
        )
        sizes.append(counts)
        return found

    def backward(gradients: Sequence[Any]) -> list[Any]:
        """The gradient of a rank's rows is the mean over the ranks of the gradients with respect to them."""
        means = _reduced(gradients, None, Average, (1.0, 1.0), process_set)
        place = process_set.rank()
        world = len(process_set.ranks)
        return [tf.split(mean, tf.unstack(sizes[0])[number], num=world)[place] for number, mean in enumerate(means)]

    return differentiable(forward, backward, rows)


# -- broadcast ---------------------------------------------------------------------------------------------------------


def _broadcast(tensors: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    if root_rank not in process_set.ranks:
        raise TensorFlowHorovodInternalError(f"root_rank {root_rank} is not in {process_set}. Name one of its ranks.")
    root = process_set.ranks.index(root_rank)

    def forward(*given: Any) -> list[Any]:
        return collective(
            "Broadcast",
            given,
            lambda arrays: BroadcastCall(tensors=tuple(each.clone() for each in arrays), root=root),
            name,
            process_set,
            [each.shape for each in given],
        )

    def backward(gradients: Sequence[Any]) -> list[Any]:
        """The gradient at the root is the mean over the ranks; elsewhere it is zero."""
        means = _reduced(gradients, None, Average, (1.0, 1.0), process_set)
        if context().rank == root_rank:
            return means
        with tf.control_dependencies(means):  # or a graph would leave out this rank's part of the reduction
            return [tf.zeros_like(each) for each in gradients]

    return differentiable(forward, backward, tensors_of(tensors))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of rank `root_rank` (of the job), on every rank. Gradients flow through.

    Args:
        tensor: of the same shape and dtype on every rank.
        root_rank: rank in the job whose value is used.
        name: matches calls of different ranks; without one they are matched by their order.
        ignore_name_scope: accepted for Horovod's signature.
        process_set: the ranks of the call; all by default.

    Raises:
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    return _broadcast([tensor], root_rank, name, process_set)[0]


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite variables with those of rank `root_rank`. Returns their values.

    Args:
        variables: of the same shapes and dtypes on every rank.
        root_rank: rank in the job whose value is used.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.
    """
    if not variables:
        return []
    found = _broadcast(variables, root_rank, name, process_set)
    assigned = [variable.assign(new) for variable, new in zip(variables, found, strict=True)]
    if tf.executing_eagerly():
        return found
    with tf.control_dependencies([each for each in assigned if each is not None]):
        return [tf.identity(each) for each in found]
