"""Codes of four and of two bits by compiled loops; unsupported and invalid inputs use plain torch.

Where residual.after is residual.before, neither holds anything useful after NotFinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.blocks import (
    Divisor,
    blocks_of,
    buffers,
    by_halves,
    columns,
    decodable,
    message,
    tiled,
    tiling,
    written,
)
from gossamer.base.kernels.dispatch import kernel
from gossamer.base.kernels.library import Count, Function, Pointer, address
from gossamer.base.kernels.reference import float4, sign_magnitude
from gossamer.base.kernels.reference.residual import Residual, both

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
    _FLOAT4_ENCODE(*buffers(x, residual), *tiling(sizes), block, address(scales), address(codes))
    return scales, codes


@kernel(float4.float4_decode)
def float4_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    counts = blocks_of(sizes, block), torch.uint8, blocks_of(sizes, 2)
    if not (block % 2 == 0 and decodable(payloads, sizes, out, *counts)):
        return float4.float4_decode(payloads, sizes, block, out, divisor)
    return written(_FLOAT4_DECODE(*columns(payloads), *tiling(sizes), block, divisor, address(out)))


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
