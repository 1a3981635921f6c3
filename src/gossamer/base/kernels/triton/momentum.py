"""Momentum: the average over steps, and the offered values, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.launch import EXACT, TILE, tiles
from gossamer.base.kernels.triton.wanted import raw, widened


@triton.jit
def _accelerate(x, before, after, offered, rate, numel, nesterov: tl.constexpr, tile: tl.constexpr):
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = place < numel
    number = widened(tl.load(x + place, mask=inside, other=0))
    speed = number + tl.load(before + place, mask=inside, other=0.0) * rate
    tl.store(after + place, speed, mask=inside)
    if nesterov:
        tl.store(offered + place, number + speed * rate, mask=inside)


def accelerate(x: Tensor, rate: float, momentum: Residual, *, nesterov: bool) -> Tensor:
    """Overwrite momentum.after with u' = x + rate momentum.before. Returns u', or x + rate u': (n,) float32."""
    offered = torch.empty_like(momentum.after) if nesterov else momentum.after
    if len(x):
        _accelerate[tiles(len(x))](
            raw(x), momentum.before, momentum.after, offered, float(rate), len(x), nesterov=nesterov, tile=TILE, **EXACT
        )
    return offered
