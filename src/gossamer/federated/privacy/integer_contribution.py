"""Integer contribution: a device's clipped contribution on a grid of integers, with its share of the noise.

The seam to a secure sum: devices give `integers(...)` to it, any `survivors` or more of which it adds up exactly or
modulo anything that holds the sum, and `mean_of(...)` makes the cohort's mean of the total.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.federated.privacy.clipping import clipped
from gossamer.federated.privacy.integer_noise import integer_noise
from gossamer.federated.privacy.random_bits import RandomBits, SystemBits, uniforms
from gossamer.strategies.federated.integer_grid import IntegerGrid


def integers(blocks: Sequence[Tensor], grid: IntegerGrid, mechanism: str, bits: RandomBits | None = None) -> Tensor:
    """(entries,) in int64, each within `grid.largest`: all blocks, (n,) each, side by side. Raises NotFinite."""
    bits = bits or SystemBits()
    scaled = torch.cat(clipped(blocks, grid.clip)) / grid.unit
    rounded = _rounded(scaled, grid.norm, bits)
    noise = integer_noise(rounded.numel(), grid.local_variance, mechanism, bits)
    return (rounded + noise).clamp_(-grid.largest, grid.largest)  # which happens once in 1e20


def mean_of(total: Tensor, devices: float, grid: IntegerGrid, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The mean of so many devices' contributions, `count` blocks, of the exact sum of their integers: (entries,)."""
    return tuple(block.to(dtype) for block in (total.double() * (grid.unit / devices)).chunk(count))


def _rounded(scaled: Tensor, norm: float, bits: RandomBits) -> Tensor:
    """Each number to one of its two neighbors, the nearer the likelier; anew until all have at most such a norm, which
    takes three attempts at most on the average."""
    below = scaled.floor()
    rest = scaled - below
    while True:
        coins = torch.from_numpy(uniforms(bits, scaled.numel()))
        found = below + (coins <= rest)
        if float(found.norm()) <= norm:
            return found.long()
