"""Allreduce, allgather and broadcast of torch tensors: synchronous, asynchronous, in place and grouped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.basics import (
    Average,
    ProcessSet,
    Sum,
    context,
    global_process_set,
    reduction,
)
from gossamer.horovod.calls import (
    AllGatherCall,
    AllReduceCall,
    BroadcastCall,
    CollectiveCall,
    ReductionOp,
)
from gossamer.horovod.compression import Compressors, TensorCompressor
from gossamer.horovod.exceptions import HorovodInternalError


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply, which torch does not annotate."""
    untyped: Any = function
    return untyped.apply(*arguments)


Handle = int | Callable[[], Any]


class HalfCompressor(TensorCompressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


Compression = Compressors(fp16=HalfCompressor)
Compressor, NoneCompressor, FP16Compressor = TensorCompressor, Compression.none, Compression.fp16  # Horovod's names


def apply_compressed(
    function: type[torch.autograd.Function],
    how: tuple[Any, ...],
    compression: type[TensorCompressor],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """function.apply(how, *tensors), which compressed tensors pass through."""
    sent = [compression.compress(tensor) for tensor in tensors]
    found = apply(function, how, *(tensor for tensor, _ in sent))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, sent, strict=True)]


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous call and return its result.

    Args:
        handle: as an asynchronous call returned it.

    Raises:
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    return handle() if callable(handle) else context().synchronize(handle)


def submit(call: CollectiveCall, name: str | None, process_set: ProcessSet) -> int:
    for tensor in call.tensors:
        if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
            raise ValueError(
                f"Tensor type {tensor.type()} is not supported: dense tensors of real numbers, integers and bools are. "
                "For sparse ones use sparse_allreduce_async; for complex ones torch.view_as_real."
            )
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # the thread that communicates has its own stream
    return context().submit(call, name, process_set)


def like_given(given: Sequence[Tensor], found: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(like.device) for like, tensor in zip(given, found, strict=True)]


def written(given: Sequence[Tensor], found: Sequence[Tensor]) -> list[Tensor]:
    """The given tensors, overwritten."""
    for tensor, new in zip(given, found, strict=True):
        if tensor.data_ptr() != new.data_ptr():  # a broadcast writes to contiguous memory itself
            tensor.detach().copy_(new)
    return list(given)


# -- allreduce ---------------------------------------------------------------------------------------------------------


def _reduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReductionOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    finish: Callable[[list[Tensor]], Any],
) -> int:
    prescale, postscale = factors
    call = AllReduceCall(tensors=tuple(tensors), op=op, prescale=prescale, postscale=postscale, finish=finish)
    return submit(call, name, process_set)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `allreduce`, without gradients. Returns a handle for `poll` and `synchronize`; do not write to the tensor
    before."""
    factors = prescale_factor, postscale_factor
    done = reduction(op, average)
    return _reduce([tensor], name, done, factors, process_set, lambda found: like_given([tensor], found)[0])


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `allreduce_async`, and the result overwrites the tensor."""
    factors = prescale_factor, postscale_factor
    done = reduction(op, average)
    return _reduce([tensor], name, done, factors, process_set, lambda found: written([tensor], found)[0])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce`, without gradients, and the result overwrites the tensor."""
    found: Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return found


class _AllReduceFunction(torch.autograd.Function):
    """Gradients of a reduction are reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], *tensors: Tensor) -> Any:
        ctx.how = how
        name, op, factors, process_set = how
        found = synchronize(_reduce(tensors, name, op, factors, process_set, lambda found: like_given(tensors, found)))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, op, factors, process_set = ctx.how
        return None, *apply(_AllReduceFunction, (None, op, factors, process_set), *gradients)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of a tensor over the ranks: a new tensor. Gradients flow through.

    Args:
        tensor: of the same shape and dtype on every rank.
        average: Former argument: False means op=Sum.
        name: Matches calls of different ranks; without one they are matched by their order.
        compression: Compression.fp16 sends float16.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are truncated.
        prescale_factor, postscale_factor: multiplied before and after.
        process_set: The ranks of the call.

    Raises:
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `allreduce`, for several tensors at once."""
    how = name, reduction(op, average), (prescale_factor, postscale_factor), process_set
    return apply_compressed(_AllReduceFunction, how, compression, tensors)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `allreduce_async`, for several tensors at once."""
    factors = prescale_factor, postscale_factor
    return _reduce(
        tensors, name, reduction(op, average), factors, process_set, lambda found: like_given(tensors, found)
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `grouped_allreduce_async`, and the results overwrite the tensors."""
    factors = prescale_factor, postscale_factor
    return _reduce(tensors, name, reduction(op, average), factors, process_set, lambda found: written(tensors, found))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `allreduce_`, for several tensors at once."""
    found: list[Tensor] = synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return found


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReductionOp = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """The sum or mean of sparse tensors: ranks gather indices and values. Returns a function that waits for it.

    Args:
        tensor: a sparse COO tensor, of the same size on every rank.
        name: matches calls of different ranks; without one they are matched by their order.
        op: Average or Sum.
        process_set: the ranks of the call; all by default.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are reduced by Average or Sum, not {op}. Reduce tensor.to_dense() instead.")
    held = tensor.detach().coalesce()
    columns = held.indices().t().contiguous()
    handle = grouped_allgather_async([columns, held.values()], name, process_set)

    def wait() -> Tensor:
        indices, values = synchronize(handle)
        if op is Average:
            values = values / len(process_set.ranks)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.size(), check_invariants=True).coalesce()

    return wait


# -- allgather ---------------------------------------------------------------------------------------------------------


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def _gather(
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[list[tuple[Tensor, list[int]]]], Any],
) -> int:
    return submit(AllGatherCall(tensors=tuple(map(_rows, tensors)), finish=finish), name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `allgather_async`, for several tensors at once."""
    return _gather(tensors, name, process_set, lambda found: like_given(tensors, [each for each, _ in found]))


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As `allgather`, without gradients. Returns a handle."""
    return _gather([tensor], name, process_set, lambda found: found[0][0].to(tensor.device))


class _AllGatherFunction(torch.autograd.Function):
    """The gradient of a rank's rows is the mean over the ranks of the gradients with respect to them."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        found = synchronize(_gather(tensors, name, process_set, lambda found: found))
        ctx.process_set, ctx.sizes = process_set, [sizes for _, sizes in found]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(like_given(tensors, [each for each, _ in found]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        means = grouped_allreduce([each.contiguous() for each in gradients], op=Average, process_set=ctx.process_set)
        place = ctx.process_set.rank()
        mine = [mean.split(sizes)[place] for mean, sizes in zip(means, ctx.sizes, strict=True)]
        return None, None, *(each.reshape(shape) for each, shape in zip(mine, ctx.shapes, strict=True))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, concatenated along the first dimension. Gradients flow through.

    Args:
        tensor: of the same dtype on every rank, and of the same size in all dimensions but the first; a scalar counts
            as one row.
        name, process_set: As for `allreduce`.

    Raises:
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As `allgather`, for several tensors at once."""
    return list(apply(_AllGatherFunction, name, process_set, *tensors))


# -- broadcast ---------------------------------------------------------------------------------------------------------


def broadcast_call(
    tensors: Sequence[Tensor], root_rank: int, process_set: ProcessSet, finish: Callable[[list[Tensor]], Any]
) -> BroadcastCall:
    """A call that overwrites the tensors' memory where it is contiguous and on the CPU."""
    if root_rank not in process_set.ranks:
        raise HorovodInternalError(f"root_rank {root_rank} is not in {process_set}. Name one of its ranks.")
    return BroadcastCall(tensors=tuple(tensors), root=process_set.ranks.index(root_rank), finish=finish)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `broadcast`, without gradients. Returns a handle."""
    copy = tensor.detach().clone()
    call = broadcast_call([copy], root_rank, process_set, lambda found: like_given([tensor], found)[0])
    return submit(call, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `broadcast_async`, and the result overwrites the tensor."""
    call = broadcast_call([tensor], root_rank, process_set, lambda found: written([tensor], found)[0])
    return submit(call, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, without gradients, and the result overwrites the tensor."""
    found: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return found


class _BroadcastFunction(torch.autograd.Function):
    """The gradient at the root is the mean over the ranks; elsewhere it is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        found: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mean = allreduce(gradients[0].contiguous(), op=Average, process_set=ctx.process_set)
        return mean if context().rank == ctx.root_rank else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of rank `root_rank` (of the job), on every rank: a new tensor. Gradients flow through.

    Args:
        tensor: of the same shape and dtype on every rank.
        root_rank: rank in the job whose value is used.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.

    Raises:
        HorovodInternalError: ranks made different calls, or a rank was lost.
    """
    found: Tensor = apply(_BroadcastFunction, tensor, root_rank, name, process_set)
    return found
