"""Broken twins: kernels whose bits depend on the GPU, which the search for such instructions must find."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gossamer.base.kernels.triton.launch import EXACT


@triton.jit
def twin_fused(x, y):
    place = tl.arange(0, 16)
    tl.store(y + place, tl.load(x + place) * 3.1 + tl.load(y + place))


@triton.jit
def twin_approximate(x, y):
    place = tl.arange(0, 16)
    tl.store(y + place, tl.load(x + place) / tl.load(y + place))


CASES = [
    lambda: twin_fused[(1,)](torch.ones(16), torch.ones(16)),
    lambda: twin_approximate[(1,)](torch.ones(16), torch.ones(16), **EXACT),
]
