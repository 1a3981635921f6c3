"""Codes of numbers by compiled loops, from 16 bits to less than 2; unsupported and invalid inputs use plain torch.

Where residual.after is residual.before, neither holds anything useful after NotFinite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.blocks import (
    Divisor,
    are,
    blocks_of,
    buffers,
    by_halves,
    columns,
    decodable,
    message,
    octets,
    tiled,
    tiling,
    within_tensors,
    written,
)
from gossamer.base.kernels.buffer_pool import empty
from gossamer.base.kernels.checks import summable
from gossamer.base.kernels.library import OVERFLOW, Count, Function, Pointer, address, addresses, kernel, serves
from gossamer.base.kernels.reference import float4, half, onebit, quantize, sign_magnitude, ternary, twobit
from gossamer.base.kernels.reference import levels as levelled
from gossamer.base.kernels.reference.residual import Residual, both

MOST_LEVELS = 2**15 - 1

Key = ctypes.c_uint64
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


@kernel(quantize.int8_encode)
def int8_encode(
    x: Tensor, sizes: Sequence[int], block: int, key: int | None = None, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not tiled(sizes, x, *both(residual)):
        return quantize.int8_encode(x, sizes, block, key, residual)
    scales, codes = message(blocks_of(sizes, block), len(x), torch.int8)
    drawn = None if key is None else ctypes.byref(Key(key))
    held = within_tensors(sizes, block)
    _INT8_ENCODE(*buffers(x, residual), *tiling(sizes), held, drawn, address(scales), address(codes))
    return scales, codes


@kernel(onebit.onebit_encode)
def onebit_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (by_halves(block) and tiled(sizes, x, *both(residual))):
        return onebit.onebit_encode(x, sizes, block, residual)
    scales, bits = message(blocks_of(sizes, block), blocks_of(sizes, 8))
    _ONEBIT_ENCODE(*buffers(x, residual), *tiling(sizes), block, address(scales), address(bits))
    return scales, bits


@kernel(twobit.twobit_encode)
def twobit_encode(
    x: Tensor, sizes: Sequence[int], block: int, thresholds: Tensor, residual: Residual | None = None
) -> Tensor:
    given = are([thresholds], torch.float32, blocks_of(sizes, block))
    if not (block % 8 == 0 and given and tiled(sizes, x, *both(residual))):
        return twobit.twobit_encode(x, sizes, block, thresholds, residual)
    codes = octets(blocks_of(sizes, 4))
    _TWOBIT_ENCODE(*buffers(x, residual), *tiling(sizes), block, 0.0, address(thresholds), address(codes))
    return codes


@kernel(twobit.twobit_measured_encode)
def twobit_measured_encode(
    x: Tensor, sizes: Sequence[int], block: int, part: float, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (part > 0 and by_halves(block) and tiled(sizes, x, *both(residual))):
        return twobit.twobit_measured_encode(x, sizes, block, part, residual)
    thresholds, codes = message(blocks_of(sizes, block), blocks_of(sizes, 4))
    _TWOBIT_ENCODE(*buffers(x, residual), *tiling(sizes), block, part, address(thresholds), address(codes))
    return thresholds, codes


@kernel(ternary.ternary_encode)
def ternary_encode(
    x: Tensor, sizes: Sequence[int], scales: Tensor, key: int, per_byte: int, after: Tensor | None = None
) -> Tensor:
    if not (are([scales], torch.float32, len(sizes)) and tiled(sizes, x, *([] if after is None else [after]))):
        return ternary.ternary_encode(x, sizes, scales, key, per_byte, after)
    codes = octets(blocks_of(sizes, per_byte))
    _TERNARY_ENCODE(address(x), address(after), *tiling(sizes), address(scales), key, per_byte, address(codes))
    return codes


@kernel(ternary.magnitudes)
def magnitudes(x: Tensor, sizes: Sequence[int]) -> Tensor:
    if not tiled(sizes, x):
        return ternary.magnitudes(x, sizes)
    found = torch.empty(len(sizes), device="cpu")
    _MAGNITUDES(address(x), *tiling(sizes), address(found))
    return found


@kernel(ternary.squares)
def squares(x: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    if not (by_halves(block) and tiled(sizes, x)):
        return ternary.squares(x, sizes, block)
    sums = torch.empty(blocks_of(sizes, block), dtype=torch.float64, device="cpu")
    _SQUARES(address(x), *tiling(sizes), block, address(sums))
    return sums


@kernel(levelled.levels_encode)
def levels_encode(
    x: Tensor, sizes: Sequence[int], block: int, levels: int, key: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (by_halves(block) and levels <= MOST_LEVELS and tiled(sizes, x, *both(residual))):
        return levelled.levels_encode(x, sizes, block, levels, key, residual)
    norms, codes = message(blocks_of(sizes, block), blocks_of(sizes, 8, levelled.level_bits(levels)))
    counts = (*tiling(sizes), block, levels, levelled.level_bits(levels))
    _LEVELS_ENCODE(*buffers(x, residual), *counts, key, address(norms), address(codes))
    return norms, codes


@kernel(quantize.int8_decode)
def int8_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    if not decodable(payloads, sizes, out, blocks_of(sizes, block), torch.int8, len(out)):
        return quantize.int8_decode(payloads, sizes, block, out, divisor)
    _INT8_DECODE(*columns(payloads), *tiling(sizes), within_tensors(sizes, block), divisor, address(out))
    return None


@kernel(onebit.onebit_decode)
def onebit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    count = blocks_of(sizes, 8)
    if not (block % 8 == 0 and decodable(payloads, sizes, out, blocks_of(sizes, block), torch.uint8, count)):
        return onebit.onebit_decode(payloads, sizes, block, out, divisor)
    return written(_ONEBIT_DECODE(*columns(payloads), *tiling(sizes), block, divisor, address(out)))


@kernel(twobit.twobit_decode)
def twobit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    count = blocks_of(sizes, 4)
    if not (block % 8 == 0 and decodable(payloads, sizes, out, blocks_of(sizes, block), torch.uint8, count)):
        return twobit.twobit_decode(payloads, sizes, block, out, divisor)
    return written(_TWOBIT_DECODE(*columns(payloads), *tiling(sizes), block, count, divisor, address(out)))


@kernel(ternary.ternary_decode)
def ternary_decode(
    payloads: Sequence[tuple[Tensor]],
    scales: Tensor,
    sizes: Sequence[int],
    per_byte: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    count, codes = blocks_of(sizes, per_byte), [packed for (packed,) in payloads]
    plain = are(codes, torch.uint8, count) and are([scales], torch.float32, len(sizes))
    if not (plain and tiled(sizes, out) and summable(scales, max(1, len(codes)))):
        return ternary.ternary_decode(payloads, scales, sizes, per_byte, out, divisor)
    counts = (*tiling(sizes), per_byte, count)
    return written(_TERNARY_DECODE(addresses(codes), len(codes), address(scales), *counts, divisor, address(out)))


@kernel(levelled.levels_decode)
def levels_decode(
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    block: int,
    levels: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    count = blocks_of(sizes, 8, levelled.level_bits(levels))
    plain = block % 8 == 0 and levels <= MOST_LEVELS
    if not (plain and decodable(payloads, sizes, out, blocks_of(sizes, block), torch.uint8, count)):
        return levelled.levels_decode(payloads, sizes, block, levels, out, divisor)
    counts = (*tiling(sizes), block, levels, levelled.level_bits(levels))
    return written(_LEVELS_DECODE(*columns(payloads), *counts, divisor, address(out)))


# -- a sign and a power of two; a sign and one of two magnitudes -------------------------------------------------------

_ENCODE = [*[Pointer] * 4, Count, Count, *[Pointer] * 2]
_DECODE = [*[Pointer] * 2, Count, Pointer, Count, Count, Divisor, Pointer]
_FLOAT4_ENCODE = Function("gossamer_float4_encode", *_ENCODE)
_FLOAT4_DECODE = Function("gossamer_float4_decode", *_DECODE)
_SIGN_MAGNITUDE_ENCODE = Function("gossamer_sign_magnitude_encode", *_ENCODE)
_SIGN_MAGNITUDE_DECODE = Function("gossamer_sign_magnitude_decode", *_DECODE)


@kernel(float4.float4_encode)
def float4_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (block % 2 == 0 and tiled(sizes, x, *both(residual))):
        return float4.float4_encode(x, sizes, block, residual)
    scales, codes = message(blocks_of(sizes, block), blocks_of(sizes, 2))
    held = within_tensors(sizes, block)
    _FLOAT4_ENCODE(*buffers(x, residual), *tiling(sizes), held, address(scales), address(codes))
    return scales, codes


@kernel(float4.float4_decode)
def float4_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    counts = blocks_of(sizes, block), torch.uint8, blocks_of(sizes, 2)
    if not (block % 2 == 0 and decodable(payloads, sizes, out, *counts)):
        return float4.float4_decode(payloads, sizes, block, out, divisor)
    held = within_tensors(sizes, block)
    return written(_FLOAT4_DECODE(*columns(payloads), *tiling(sizes), held, divisor, address(out)))


@kernel(sign_magnitude.sign_magnitude_encode)
def sign_magnitude_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if not (by_halves(block) and tiled(sizes, x, *both(residual))):
        return sign_magnitude.sign_magnitude_encode(x, sizes, block, residual)
    means, codes = message(2 * blocks_of(sizes, block), blocks_of(sizes, 4))
    _SIGN_MAGNITUDE_ENCODE(*buffers(x, residual), *tiling(sizes), block, address(means), address(codes))
    return means, codes


@kernel(sign_magnitude.sign_magnitude_decode)
def sign_magnitude_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    counts = 2 * blocks_of(sizes, block), torch.uint8, blocks_of(sizes, 4)
    if not (block % 4 == 0 and decodable(payloads, sizes, out, *counts)):
        return sign_magnitude.sign_magnitude_decode(payloads, sizes, block, out, divisor)
    return written(_SIGN_MAGNITUDE_DECODE(*columns(payloads), *tiling(sizes), block, divisor, address(out)))


# -- 16-bit numbers ----------------------------------------------------------------------------------------------------

EXPONENT_BITS = {torch.bfloat16: 8, torch.float16: 5}

_HALF_ENCODE = Function("gossamer_half_encode", Pointer, Count, Count, ctypes.c_float, Pointer)
_HALF_DECODE = Function("gossamer_half_decode", Pointer, *[Count] * 3, ctypes.c_float, Pointer)


@kernel(half.half_encode)
def half_encode(x: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    if dtype not in EXPONENT_BITS or not serves(x, types=(torch.float32,)):
        return half.half_encode(x, dtype, terms)
    found = empty(len(x), dtype)
    _HALF_ENCODE(address(x), len(x), EXPONENT_BITS[dtype], torch.finfo(x.dtype).max / terms, address(found))
    return found


@kernel(half.half_decode)
def half_decode(payloads: Sequence[Tensor], out: Tensor, divisor: int = 1) -> bool:
    dtype = payloads[0].dtype
    alike = all(payload.dtype == dtype and payload.shape == (out.numel(),) for payload in payloads)
    kernel_serves = alike and serves(out, types=(torch.float32,)) and serves(*payloads, types=tuple(EXPONENT_BITS))
    if not kernel_serves:
        return half.half_decode(payloads, out, divisor)
    counts = len(payloads), out.numel(), EXPONENT_BITS[dtype]
    return _HALF_DECODE(addresses(payloads), *counts, divisor, address(out)) != OVERFLOW
