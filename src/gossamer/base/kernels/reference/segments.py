"""Segments: tensors side by side, cut into blocks. No block reaches from one tensor into the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.base.kernels.reference.finite import all_finite, expect_summable
from gossamer.base.kernels.reference.gram_schmidt import sum_of_halves
from gossamer.errors import MalformedError, NotFinite

LARGEST_BLOCK = 2**14  # for sums by halves: tensors are padded to whole blocks; kLargestBlock in C++


def blocks(sizes: Sequence[int], block: int) -> int:
    """How many blocks tensors of these sizes have."""
    return sum(-(-size // block) for size in sizes)


def rows(span: Tensor, block: int) -> Tensor:
    """(n,) -> (ceil(n / block), block), the last row filled up with zeros."""
    short = -span.numel() % block
    return (pad(span, (0, short)) if short else span).view(-1, block)


def by_block(x: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """(sum of sizes,) -> (blocks, block), the last row of each tensor filled up with zeros."""
    return torch.cat([rows(span, block) for span in x.split(list(sizes))] or [x.new_empty(0, block)])


def block_maxima(x: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """The largest entry of each block: (blocks,). A block may be much larger than a tensor."""
    found = [rows(span, min(block, max(span.numel(), 1))).amax(1) for span in x.split(list(sizes))]
    return torch.cat(found or [x.new_empty(0)])


def block_sums(x: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """The sum of each block, a power of two, taken by halves: (blocks,). Other loops come to the same bits."""
    return sum_of_halves(by_block(x, sizes, block)[:, :, None]).view(-1)


def block_sizes(sizes: Sequence[int], block: int, like: Tensor) -> Tensor:
    """How many entries each block has: (blocks,)."""
    starts = [torch.arange(0, size, block, device=like.device) for size in sizes]
    found = [(size - start).clamp(max=block) for start, size in zip(starts, sizes, strict=True)]
    return torch.cat(found or [like.new_empty(0)]).to(like.dtype)


def spread(scales: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """(blocks,) -> (sum of sizes,): for each entry its block's scale."""
    parts = scales.split([-(-size // block) for size in sizes])
    found = [part.repeat_interleave(min(block, size))[:size] for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(found or [scales.new_empty(0)])


def per_tensor(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """(tensors,) -> (sum of sizes,): for each entry its tensor's value."""
    return torch.cat([value.expand(size) for value, size in zip(values, sizes, strict=True)] or [values.new_empty(0)])


def sendable(scales: Tensor) -> Tensor:
    """The scales as float32. Raises NotFinite where one left its range."""
    found = scales.float()
    if not all_finite(found):
        raise NotFinite("numbers of a block are so large that their scale is not finite")
    return found


def expect(tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    if tensor.dtype != dtype or tensor.shape != (numel,):
        raise MalformedError(f"a payload of {numel} {dtype} was due, and {tuple(tensor.shape)} {tensor.dtype} came")


def expect_numbers(tensor: Tensor, shape: Sequence[int], payloads: int) -> None:
    """Raise MalformedError unless these are float32 numbers of a shape, and can be added up over so many payloads."""
    if tensor.dtype != torch.float32 or tensor.shape != tuple(shape):
        raise MalformedError(
            f"float32 numbers of shape {tuple(shape)} were due, and {tuple(tensor.shape)} {tensor.dtype} came"
        )
    expect_summable(tensor, payloads)


def average(terms: Iterable[Tensor], out: Tensor, divisor: int) -> None:
    """Overwrite `out` with the sum of the terms, in the order given, over `divisor`."""
    out.zero_()
    for term in terms:
        out.add_(term)
    if divisor != 1:
        out.div_(divisor)
