"""Alltoall and reducescatter of TensorFlow tensors, eagerly and in graphs. Gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from gossamer.horovod.basics import Average, ProcessSet, Sum, global_process_set
from gossamer.horovod.calls import AllToAllCall, ReduceScatterCall, ReductionOp, checked_splits
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.tensorflow.host import collective, differentiable, tensors_of
from gossamer.horovod.tensorflow.ops import Compression, grouped_allgather


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank and receive rows of each. Gradients flow through.

    Args:
        tensor: of the same dtype and the same further dimensions on every rank.
        splits: How many rows go to each rank, in order; None: equally many.
        name, process_set, ignore_name_scope: As for `allreduce`.

    Returns:
        The rows received, by rank; with `splits` also how many came from each rank.

    Raises:
        ValueError: for splits that do not fit; also a tf.errors.InvalidArgumentError.
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    (rows,) = tensors_of([tensor])
    splits_given = splits is not None
    counts = tf.convert_to_tensor(splits) if splits_given else tf.zeros([0], tf.int32)
    if counts.dtype not in (tf.int32, tf.int64):
        raise ValueError(f"splits must be 32-bit or 64-bit integers, got {counts.dtype.name}")
    world = len(process_set.ranks)
    received: list[Any] = []

    def make(arrays: tuple[torch.Tensor, ...]) -> AllToAllCall:
        given, requested = arrays
        parts = checked_splits(given, requested.tolist() if splits_given else None, world)
        return AllToAllCall(tensors=(given[: sum(parts)],), splits=tuple(parts), splits_given=splits_given)

    def forward(given: Any) -> list[Any]:
        shape = None if given.shape.rank is None else [None, *given.shape[1:]]
        found, sizes = collective(
            "Alltoall",
            [given, counts],
            make,
            name,
            process_set,
            [shape, [world]],
            lambda answer: [(answer[0], 0), (torch.tensor(answer[1], dtype=torch.int64).to(_KINDS[counts.dtype]), 1)],
        )
        received.append(sizes)
        return [found]

    def backward(gradients: Sequence[Any]) -> list[Any]:
        """Gradients go the same ways back; rows that were not sent have none."""
        back, _ = alltoall(gradients[0], received[0], process_set=process_set)
        missing = tf.shape(rows)[0] - tf.shape(back)[0]
        return [tf.pad(back, [[0, missing], *([0, 0] for _ in rows.shape[1:])])]

    (found,) = differentiable(forward, backward, [rows])
    return (found, received[0]) if splits_given else found


_KINDS = {tf.int32: torch.int32, tf.int64: torch.int64}


def _scattered(
    tensors: Sequence[Any],
    name: str | None,
    op: ReductionOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Any]:
    if op is ReductionOp.ADASUM:
        raise NotImplementedError("reducescatter does not support Adasum. Use op=hvd.Average.")
    prescale, postscale = factors

    def make(arrays: tuple[torch.Tensor, ...]) -> ReduceScatterCall:
        if any(not each.dim() for each in arrays):
            raise ValueError("reducescatter takes tensors of at least one dimension. Write tf.reshape(tensor, [1]).")
        return ReduceScatterCall(tensors=arrays, op=op, prescale=prescale, postscale=postscale)

    def forward(*given: Any) -> list[Any]:
        shapes = [[None, *each.shape[1:]] if each.shape.rank else None for each in given]
        return collective("Reducescatter", given, make, name, process_set, shapes)

    def backward(gradients: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks' rows are gathered; those of a sum count once for each rank."""
        factor = prescale * postscale * (len(process_set.ranks) if op is Sum else 1)
        return grouped_allgather([each * tf.cast(factor, each.dtype) for each in gradients], None, False, process_set)

    return differentiable(forward, backward, tensors_of(tensors))


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks; each rank receives its rows of the result. Gradients flow through.

    The first ranks receive one row more where rows do not divide by the number of ranks. Arguments and errors are those
    of `allreduce`.

    Args:
        tensor: of the same shape and dtype on every rank, with at least one dimension.
        device_dense: accepted for Horovod's signature.
        compression: Compression.fp16 sends float16.
        op: Average (default) or Sum.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.
        ignore_name_scope: accepted for Horovod's signature.
        prescale_factor, postscale_factor: factors before and after the reduction.
    """
    factors = prescale_factor, postscale_factor
    return _compressed_scatter([tensor], name, compression, op, factors, process_set)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """As `reducescatter`, for several tensors at once."""
    return _compressed_scatter(tensors, None, compression, op, (prescale_factor, postscale_factor), process_set)


def _compressed_scatter(
    tensors: Sequence[Any],
    name: str | None,
    compression: type[TensorCompressor],
    op: ReductionOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Any]:
    sent = [compression.compress(each) for each in tensors_of(tensors)]
    found = _scattered([each for each, _ in sent], name, op, factors, process_set)
    return [compression.decompress(each, ctx) for each, (_, ctx) in zip(found, sent, strict=True)]
