"""Block buffers: checks that buffers fit, and their addresses, before a compiled loop runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.base.kernels.buffer_pool import ALIGNMENT, empty, scratch_like
from gossamer.base.kernels.checks import summable
from gossamer.base.kernels.library import MALFORMED, address, addresses, counts_array, serves
from gossamer.base.kernels.reference.bits import refused
from gossamer.base.kernels.reference.residual import Residual, both
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK, blocks

Divisor = ctypes.c_float


def are(tensors: Sequence[Tensor], dtype: torch.dtype, numel: int) -> bool:
    return all(tensor.dtype == dtype and tensor.shape == (numel,) for tensor in tensors) and serves(*tensors)


def tiled(sizes: Sequence[int], *buffers: Tensor) -> bool:
    """Whether these are float32 buffers that the sizes tile."""
    total = _walked(sizes).total
    return total is not None and are(buffers, torch.float32, total)


def tiling(sizes: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    return _walked(sizes).array, len(sizes)


def blocks_of(sizes: Sequence[int], block: int, of: int = 1) -> int:
    """How many blocks, or bytes, so many things for each entry take."""
    return _walked(sizes).blocks(block, of)


def within_tensors(sizes: Sequence[int], block: int) -> int:
    """A block that cuts the tensors in the same way, and is no longer than the longest of them, or one more: even."""
    return min(block, _walked(sizes).longest)


class _Walked:
    """Cached results of iterating over sizes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.array = counts_array(sizes)
        self.total = sum(sizes) if min(sizes, default=0) >= 0 else None
        self.longest = max([2, *(size + size % 2 for size in sizes)])
        self._blocks: dict[tuple[int, int], int] = {}

    def blocks(self, block: int, of: int) -> int:
        if (block, of) not in self._blocks:
            self._blocks[block, of] = blocks([size * of for size in self.sizes], block)
        return self._blocks[block, of]


_latest: dict[int, _Walked] = {}
_MOST_LATEST = 256


def _walked(sizes: Sequence[int]) -> _Walked:
    """A layout's sizes are one object at every step: found by its identity, they are not even hashed."""
    found = _latest.get(id(sizes))
    if found is not None and found.sizes is sizes:
        return found
    found = _by_value(tuple(sizes))
    if found.sizes is sizes:
        if len(_latest) >= _MOST_LATEST:
            _latest.clear()
        _latest[id(sizes)] = found
    return found


@lru_cache(maxsize=1024)
def _by_value(sizes: tuple[int, ...]) -> _Walked:
    return _Walked(sizes)


def by_halves(block: int) -> bool:
    return 8 <= block <= LARGEST_BLOCK and block & (block - 1) == 0


def decodable(
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    out: Tensor,
    scales: int,
    dtype: torch.dtype,
    codes: int,
) -> bool:
    """Whether every payload is so many float32 scales that can be added up and so many codes of a type, for a float32
    buffer."""
    fits = are([first for first, _ in payloads], torch.float32, scales)
    plain = fits and are([second for _, second in payloads], dtype, codes) and tiled(sizes, out)
    return plain and all(summable(first, len(payloads)) for first, _ in payloads)


def buffers(x: Tensor, residual: Residual | None) -> tuple[int | None, ...]:
    return (address(x), *map(address, both(residual) or (None, None)))


@contextmanager
def widened(residual: Residual | None) -> Iterator[Residual | None]:
    """Context manager: a residual for an encoder. One that is narrower than float32 is widened into scratch memory,
    times its factor, and rounded when the encoder is done."""
    if residual is None or residual.before.dtype.itemsize >= torch.float32.itemsize:
        yield residual
        return
    wide = scratch_like(residual.before, torch.float32).copy_(residual.before)
    if residual.factor != 1:
        wide.mul_(residual.factor)
    yield Residual(wide, wide)
    residual.after.copy_(wide)


def columns(payloads: Sequence[tuple[Tensor, Tensor]]) -> tuple[object, object, int]:
    return addresses([scales for scales, _ in payloads]), addresses([codes for _, codes in payloads]), len(payloads)


def octets(count: int) -> Tensor:
    return empty(count, torch.uint8)


def message(scales: int, codes: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    """Buffers of a message, (scales,) float32 and (codes,) of a type of one byte: adjacent, so that a transport sends
    them without a copy."""
    before = -4 * scales % ALIGNMENT  # codes are aligned
    room = empty(before + 4 * scales + codes, torch.uint8)[before:]
    return room[: 4 * scales].view(torch.float32), room[4 * scales :].view(dtype)


def written(answer: int) -> None:
    if answer == MALFORMED:
        raise refused()
