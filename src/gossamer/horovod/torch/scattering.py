"""Alltoall and reducescatter of torch tensors: synchronous, asynchronous and grouped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.basics import Average, ProcessSet, Sum, global_process_set
from gossamer.horovod.calls import AllToAllCall, ReduceScatterCall, ReductionOp, checked_splits
from gossamer.horovod.compression import TensorCompressor
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.torch.ops import (
    Compression,
    apply,
    apply_compressed,
    grouped_allgather,
    like_given,
    submit,
    synchronize,
)

# -- alltoall ----------------------------------------------------------------------------------------------------------


def _exchange(
    tensor: Tensor, splits: Sequence[int], splits_given: bool, name: str | None, process_set: ProcessSet, finish: Any
) -> int:
    call = AllToAllCall(
        tensors=(tensor[: sum(splits)],), splits=tuple(splits), splits_given=splits_given, finish=finish
    )
    return submit(call, name, process_set)


def _checked_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    if isinstance(splits, Tensor):
        if splits.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"splits must be 32-bit or 64-bit integers, got {splits.dtype}")
        splits = splits.tolist()
    return checked_splits(tensor, splits, len(process_set.ranks))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `alltoall`, without gradients. Returns a handle."""
    counts, splits_given = _checked_splits(tensor, splits, process_set), splits is not None

    def finish(answer: tuple[Tensor, list[int]]) -> Any:
        found, received = answer[0].to(tensor.device), answer[1]
        return (found, torch.tensor(received, dtype=torch.int32)) if splits_given else found

    return _exchange(tensor, counts, splits_given, name, process_set, finish)


class _AllToAllFunction(torch.autograd.Function):
    """Gradients go the same ways back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, counts: list[int], splits_given: bool, name: str | None, process_set: ProcessSet
    ) -> Any:
        found, received = synchronize(_exchange(tensor, counts, splits_given, name, process_set, lambda answer: answer))
        ctx.process_set, ctx.received, ctx.rows = process_set, received, len(tensor)
        sizes = torch.tensor(received, dtype=torch.int32)
        ctx.mark_non_differentiable(sizes)
        return found.to(tensor.device), sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given, _ = alltoall(gradients[0].contiguous(), ctx.received, process_set=ctx.process_set)
        padded = given.new_zeros((ctx.rows, *given.shape[1:]))  # rows that were not sent have no gradient
        padded[: len(given)] = given
        return padded, None, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank and receive rows of each. Gradients flow through.

    Args:
        tensor: of the same dtype and the same further dimensions on every rank.
        splits: How many rows go to each rank, in order; None: equally many.
        name, process_set: As for `allreduce`.

    Returns:
        The rows received, by rank; with `splits` also how many came from each rank.

    Raises:
        ValueError: for splits that do not fit.
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    counts, splits_given = _checked_splits(tensor, splits, process_set), splits is not None
    found, received = apply(_AllToAllFunction, tensor, counts, splits_given, name, process_set)
    return (found, received) if splits_given else found


# -- reducescatter -----------------------------------------------------------------------------------------------------


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReductionOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    finish: Callable[[list[Tensor]], Any],
) -> int:
    if any(not tensor.dim() for tensor in tensors):
        raise HorovodInternalError("reducescatter takes tensors of at least one dimension. Write tensor.reshape(1).")
    if op is ReductionOp.ADASUM:
        raise NotImplementedError("reducescatter does not support Adasum. Use op=hvd.Average.")
    prescale, postscale = factors
    call = ReduceScatterCall(tensors=tuple(tensors), op=op, prescale=prescale, postscale=postscale, finish=finish)
    return submit(call, name, process_set)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `reducescatter`, without gradients. Returns a handle."""
    factors = prescale_factor, postscale_factor
    return _scatter([tensor], name, op, factors, process_set, lambda found: like_given([tensor], found)[0])


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `reducescatter_async`, for several tensors at once."""
    factors = prescale_factor, postscale_factor
    return _scatter(tensors, name, op, factors, process_set, lambda found: like_given(tensors, found))


class _ReduceScatterFunction(torch.autograd.Function):
    """The gradients of all ranks' rows are gathered; those of a sum count once for each rank."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], *tensors: Tensor) -> Any:
        name, op, factors, process_set = how
        found = synchronize(_scatter(tensors, name, op, factors, process_set, lambda found: like_given(tensors, found)))
        ctx.how = how
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, op, (prescale, postscale), process_set = ctx.how
        factor = prescale * postscale * (len(process_set.ranks) if op is Sum else 1)
        found = grouped_allgather([(each * factor).contiguous() for each in gradients], process_set=process_set)
        return None, *found


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks; each rank receives its rows of the result. Gradients flow through.

    The first ranks receive one row more where rows do not divide by the number of ranks. Arguments and errors are those
    of `allreduce`.

    Args:
        tensor: of the same shape and dtype on every rank, with at least one dimension.
        name: matches calls of different ranks; without one they are matched by their order.
        compression: Compression.fp16 sends float16.
        op: Average (default) or Sum.
        process_set: the ranks of the call; all by default.
        prescale_factor, postscale_factor: factors before and after the reduction.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As `reducescatter`, for several tensors at once."""
    how = name, op, (prescale_factor, postscale_factor), process_set
    return apply_compressed(_ReduceScatterFunction, how, compression, tensors)
