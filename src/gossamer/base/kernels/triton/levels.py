"""Levels below a norm on a GPU: the norm of a block, and on which level below it each entry is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import levels as levelled
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.decoding import decoded
from gossamer.base.kernels.triton.encoding import encoded
from gossamer.base.kernels.triton.noise import stochastic
from gossamer.base.kernels.triton.rows import row_sums

MOST_LEVELS = 2**15 - 1  # with codes of two bytes


@triton.jit
def _unit(norm, most: tl.constexpr):
    return tl.div_rn(norm, most // 2 * 1.0)


@triton.jit
def _coded(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    norm = tl.sqrt_rn(row_sums(w * w))
    level = stochastic(w, _unit(norm, most)[:, None], place, low, high, most // 2, bits)
    return norm, norm, level + most // 2


@triton.jit
def _meant(code, norm, _, most: tl.constexpr):
    return (code - most // 2).to(tl.float32) * _unit(norm, most)


def _format(levels: int) -> CodeFormat:
    return CodeFormat(_meant, torch.uint8, levelled.level_bits(levels), most=2 * levels)


def levels_encode(
    x: Tensor, sizes: Sequence[int], block: int, levels: int, key: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.levels.levels_encode."""
    served = levels <= MOST_LEVELS
    found = encoded(_format(levels), _coded, x, sizes, block, residual, word=key) if served else None
    return found or levelled.levels_encode(x, sizes, block, levels, key, residual)


def levels_decode(
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    block: int,
    levels: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    """As reference.levels.levels_decode."""
    if not (levels <= MOST_LEVELS and decoded(_format(levels), payloads, sizes, block, out, divisor)):
        levelled.levels_decode(payloads, sizes, block, levels, out, divisor)
