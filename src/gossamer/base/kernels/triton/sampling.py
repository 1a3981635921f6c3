"""Sampling: estimated magnitudes that slightly more than the k largest entries of each tensor reach.

A program reads the sample of a tensor, one entry of every stride, at a random offset, and searches the largest
magnitude that enough of them reach, bit by bit. The result is an estimate: callers count the entries above it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.noise import mixed
from gossamer.base.kernels.triton.spans import SAMPLE, WARPS, Spans
from gossamer.base.kernels.triton.wanted import magnitude, wanted

LOW = 11  # bits of a magnitude that are left open: the bound is up to 1 in 4096 lower


@triton.jit
def _bound(x, before, starts, sizes, strides, ranks, bounds, low: tl.constexpr, sample: tl.constexpr):
    owner = tl.program_id(0)
    order, stride, rank = tl.arange(0, sample), tl.load(strides + owner), tl.load(ranks + owner)
    within = order * stride + (mixed(order.to(tl.uint32)) % stride.to(tl.uint32)).to(tl.int32)
    inside = within < tl.load(sizes + owner)
    key = magnitude(wanted(x, before, tl.load(starts + owner) + within, inside))
    key = tl.where(inside, key >> low, -1)
    bound = tl.zeros_like(rank)
    for bit in range(31 - low):
        higher = bound | (1 << (30 - low - bit))
        bound = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= rank, higher, bound)
    tl.store(bounds + owner, tl.maximum(bound << low, 1))


def bounds(x: Tensor, before: Tensor | None, spans: Spans) -> Tensor:
    """(tensors,) int32: magnitudes, of which no zero is one. The least where more are looked for than were sampled, or
    are no zeros; that of NaN where none is looked for."""
    found = torch.empty_like(spans.counts)
    if len(spans):
        _bound[(len(spans),)](
            x, before, spans.starts, spans.sizes, spans.strides, spans.ranks, found,
            low=LOW, sample=SAMPLE, num_warps=WARPS, **EXACT,
        )  # fmt: skip
    return found
