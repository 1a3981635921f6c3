"""Every entry in a few bits by compiled loops; what they are not made for, and what is wrong, goes to plain torch.

Where residual.after is residual.before, neither holds anything useful after NotFinite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.kernels import levels as levelled
from gossamer.kernels import onebit, quantise, ternary, twobit
from gossamer.kernels.bits import refused
from gossamer.kernels.native import (
    MALFORMED,
    Count,
    Function,
    Pointer,
    address,
    addresses,
    counts_array,
    documented,
    serves,
)
from gossamer.kernels.residual import Residual
from gossamer.kernels.reuse import empty
from gossamer.kernels.spans import LARGEST_BLOCK, blocks

MOST_LEVELS = 2**15 - 1

Key = ctypes.c_uint64
Divisor = ctypes.c_float
Part = ctypes.c_double

_INT8_ENCODE = Function("gossamer_int8_encode", *[Pointer] * 4, Count, Count, *[Pointer] * 3)
_ONEBIT_ENCODE = Function("gossamer_onebit_encode", *[Pointer] * 4, Count, Count, *[Pointer] * 2)
_TWOBIT_ENCODE = Function("gossamer_twobit_encode", *[Pointer] * 4, Count, Count, Part, *[Pointer] * 2)
_TERNARY_ENCODE = Function("gossamer_ternary_encode", *[Pointer] * 3, Count, Pointer, Key, Count, Pointer)
_MAGNITUDES = Function("gossamer_magnitudes", *[Pointer] * 2, Count, Pointer)
_SQUARES = Function("gossamer_squares", *[Pointer] * 2, Count, Count, Pointer)
_LEVELS_ENCODE = Function("gossamer_levels_encode", *[Pointer] * 4, *[Count] * 4, Key, *[Pointer] * 2)

_INT8_DECODE = Function("gossamer_int8_decode", *[Pointer] * 2, Count, Pointer, Count, Count, Divisor, Pointer)
_ONEBIT_DECODE = Function("gossamer_onebit_decode", *[Pointer] * 2, Count, Pointer, Count, Count, Divisor, Pointer)
_TWOBIT_DECODE = Function("gossamer_twobit_decode", *[Pointer] * 2, Count, Pointer, *[Count] * 3, Divisor, Pointer)
_TERNARY_DECODE = Function("gossamer_ternary_decode", Pointer, Count, *[Pointer] * 2, *[Count] * 3, Divisor, Pointer)
_LEVELS_DECODE = Function("gossamer_levels_decode", *[Pointer] * 2, Count, Pointer, *[Count] * 4, Divisor, Pointer)


@documented(quantise.int8_encode)
def int8_encode(
    x: Tensor, sizes: Sequence[int], block: int, key: int | None = None, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not _tiled(sizes, x, *_both(residual)):
        return quantise.int8_encode(x, sizes, block, key, residual)
    scales, codes = empty(_blocks(sizes, block), torch.float32), empty(len(x), torch.int8)
    drawn = None if key is None else ctypes.byref(Key(key))
    _INT8_ENCODE(*_buffers(x, residual), *_tiling(sizes), block, drawn, address(scales), address(codes))
    return scales, codes


@documented(onebit.onebit_encode)
def onebit_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (_halved(block) and _tiled(sizes, x, *_both(residual))):
        return onebit.onebit_encode(x, sizes, block, residual)
    scales, bits = empty(_blocks(sizes, block), torch.float32), _bytes(_blocks(sizes, 8))
    _ONEBIT_ENCODE(*_buffers(x, residual), *_tiling(sizes), block, address(scales), address(bits))
    return scales, bits


@documented(twobit.twobit_encode)
def twobit_encode(
    x: Tensor, sizes: Sequence[int], block: int, thresholds: Tensor, residual: Residual | None = None
) -> Tensor:
    given = _are([thresholds], torch.float32, _blocks(sizes, block))
    if not (block % 8 == 0 and given and _tiled(sizes, x, *_both(residual))):
        return twobit.twobit_encode(x, sizes, block, thresholds, residual)
    codes = _bytes(_blocks(sizes, 4))
    _TWOBIT_ENCODE(*_buffers(x, residual), *_tiling(sizes), block, 0.0, address(thresholds), address(codes))
    return codes


@documented(twobit.twobit_measured_encode)
def twobit_measured_encode(
    x: Tensor, sizes: Sequence[int], block: int, part: float, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (part > 0 and _halved(block) and _tiled(sizes, x, *_both(residual))):
        return twobit.twobit_measured_encode(x, sizes, block, part, residual)
    thresholds, codes = empty(_blocks(sizes, block), torch.float32), _bytes(_blocks(sizes, 4))
    _TWOBIT_ENCODE(*_buffers(x, residual), *_tiling(sizes), block, part, address(thresholds), address(codes))
    return thresholds, codes


@documented(ternary.ternary_encode)
def ternary_encode(
    x: Tensor, sizes: Sequence[int], scales: Tensor, key: int, per_byte: int, after: Tensor | None = None
) -> Tensor:
    if not (_are([scales], torch.float32, len(sizes)) and _tiled(sizes, x, *([] if after is None else [after]))):
        return ternary.ternary_encode(x, sizes, scales, key, per_byte, after)
    codes = _bytes(_blocks(sizes, per_byte))
    _TERNARY_ENCODE(address(x), address(after), *_tiling(sizes), address(scales), key, per_byte, address(codes))
    return codes


@documented(ternary.magnitudes)
def magnitudes(x: Tensor, sizes: Sequence[int]) -> Tensor:
    if not _tiled(sizes, x):
        return ternary.magnitudes(x, sizes)
    found = torch.empty(len(sizes))
    _MAGNITUDES(address(x), *_tiling(sizes), address(found))
    return found


@documented(ternary.squares)
def squares(x: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    if not (_halved(block) and _tiled(sizes, x)):
        return ternary.squares(x, sizes, block)
    sums = torch.empty(_blocks(sizes, block), dtype=torch.float64)
    _SQUARES(address(x), *_tiling(sizes), block, address(sums))
    return sums


@documented(levelled.levels_encode)
def levels_encode(
    x: Tensor, sizes: Sequence[int], block: int, levels: int, key: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (_halved(block) and levels <= MOST_LEVELS and _tiled(sizes, x, *_both(residual))):
        return levelled.levels_encode(x, sizes, block, levels, key, residual)
    norms, codes = empty(_blocks(sizes, block), torch.float32), _bytes(_blocks(sizes, 8, levelled.level_bits(levels)))
    counts = (*_tiling(sizes), block, levels, levelled.level_bits(levels))
    _LEVELS_ENCODE(*_buffers(x, residual), *counts, key, address(norms), address(codes))
    return norms, codes


@documented(quantise.int8_decode)
def int8_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    if not _decodable(payloads, sizes, out, _blocks(sizes, block), torch.int8, len(out)):
        return quantise.int8_decode(payloads, sizes, block, out, divisor)
    _INT8_DECODE(*_columns(payloads), *_tiling(sizes), block, divisor, address(out))
    return None


@documented(onebit.onebit_decode)
def onebit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    count = _blocks(sizes, 8)
    if not (block % 8 == 0 and _decodable(payloads, sizes, out, _blocks(sizes, block), torch.uint8, count)):
        return onebit.onebit_decode(payloads, sizes, block, out, divisor)
    return _written(_ONEBIT_DECODE(*_columns(payloads), *_tiling(sizes), block, divisor, address(out)))


@documented(twobit.twobit_decode)
def twobit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    count = _blocks(sizes, 4)
    if not (block % 8 == 0 and _decodable(payloads, sizes, out, _blocks(sizes, block), torch.uint8, count)):
        return twobit.twobit_decode(payloads, sizes, block, out, divisor)
    return _written(_TWOBIT_DECODE(*_columns(payloads), *_tiling(sizes), block, count, divisor, address(out)))


@documented(ternary.ternary_decode)
def ternary_decode(
    payloads: Sequence[tuple[Tensor]],
    scales: Tensor,
    sizes: Sequence[int],
    per_byte: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    count, codes = _blocks(sizes, per_byte), [packed for (packed,) in payloads]
    plain = _are(codes, torch.uint8, count) and _are([scales], torch.float32, len(sizes))
    if not (plain and _tiled(sizes, out)):
        return ternary.ternary_decode(payloads, scales, sizes, per_byte, out, divisor)
    counts = (*_tiling(sizes), per_byte, count)
    return _written(_TERNARY_DECODE(addresses(codes), len(codes), address(scales), *counts, divisor, address(out)))


@documented(levelled.levels_decode)
def levels_decode(
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    block: int,
    levels: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    count = _blocks(sizes, 8, levelled.level_bits(levels))
    plain = block % 8 == 0 and levels <= MOST_LEVELS
    if not (plain and _decodable(payloads, sizes, out, _blocks(sizes, block), torch.uint8, count)):
        return levelled.levels_decode(payloads, sizes, block, levels, out, divisor)
    counts = (*_tiling(sizes), block, levels, levelled.level_bits(levels))
    return _written(_LEVELS_DECODE(*_columns(payloads), *counts, divisor, address(out)))


def _are(tensors: Sequence[Tensor], dtype: torch.dtype, numel: int) -> bool:
    return all(tensor.dtype == dtype and tensor.shape == (numel,) for tensor in tensors) and serves(*tensors)


def _tiled(sizes: Sequence[int], *buffers: Tensor) -> bool:
    """Whether these are float32 buffers that the sizes tile."""
    total = _walked(sizes).total
    return total is not None and _are(buffers, torch.float32, total)


def _tiling(sizes: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    return _walked(sizes).array, len(sizes)


def _blocks(sizes: Sequence[int], block: int, of: int = 1) -> int:
    """How many blocks, or bytes, so many things for each entry take."""
    return _walked(sizes).blocks(block, of)


class _Walked:
    """What is known of sizes once they were walked over."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.array = counts_array(sizes)
        self.total = sum(sizes) if min(sizes, default=0) >= 0 else None
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


def _halved(block: int) -> bool:
    return 8 <= block <= LARGEST_BLOCK and block & (block - 1) == 0


def _decodable(
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    out: Tensor,
    scales: int,
    dtype: torch.dtype,
    codes: int,
) -> bool:
    """Whether every payload is so many float32 scales and so many codes of a type, for a float32 buffer."""
    fits = _are([first for first, _ in payloads], torch.float32, scales)
    return fits and _are([second for _, second in payloads], dtype, codes) and _tiled(sizes, out)


def _both(residual: Residual | None) -> tuple[Tensor, ...]:
    return () if residual is None else (residual.before, residual.after)


def _buffers(x: Tensor, residual: Residual | None) -> tuple[int | None, ...]:
    return (address(x), *map(address, _both(residual) or (None, None)))


def _columns(payloads: Sequence[tuple[Tensor, Tensor]]) -> tuple[object, object, int]:
    return addresses([scales for scales, _ in payloads]), addresses([codes for _, codes in payloads]), len(payloads)


def _bytes(count: int) -> Tensor:
    return empty(count, torch.uint8)


def _written(answer: int) -> None:
    if answer == MALFORMED:
        raise refused()
