"""Integer contribution: a device's clipped contribution on a grid of integers, with its share of the noise.

The seam to a secure sum. What is summed is a message of a linear code, encoded after feedback: its tensors are the
blocks, of `grid.entries` numbers together; the grid is `DistributedPrivacy.grid(entries, secure.bits, survivors)`, with
`survivors` of the cohort's size, which each device counts on the roster that it agreed on masks with. Devices give
`integers(...)` to the sum; it adds up `survivors` of them or more, exactly or modulo anything that holds the sum; and
`mean_of(...)` makes the mean message of the total. Nothing else of a device may go in: no weight, no number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated.privacy.integer_grid import IntegerGrid
from gossamer.federated.privacy.clipping import clipped
from gossamer.federated.privacy.integer_noise import integer_noise
from gossamer.federated.privacy.random_bits import RandomBits, SystemBits, uniforms


def integers(blocks: Sequence[Tensor], grid: IntegerGrid, mechanism: str, bits: RandomBits | None = None) -> Tensor:
    """(entries,) in int64, each within `grid.largest`: all blocks, (n,) each, side by side. Raises NotFinite."""
    bits = bits or SystemBits()
    scaled = torch.cat([block.reshape(-1) for block in clipped(blocks, grid.clip)]) / grid.unit
    rounded = _rounded(scaled, grid.norm, bits)
    noise = integer_noise(rounded.numel(), grid.local_variance, mechanism, bits)
    return (rounded + noise).clamp_(-grid.largest, grid.largest)  # which happens once in 1e20


def mean_of(total: Tensor, devices: int, grid: IntegerGrid, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The mean over so many devices, in blocks like these, of the sum of their integers: (entries,)."""
    parts = (total.double() * (grid.unit / devices)).split([block.numel() for block in like])
    return tuple(part.to(block.dtype).view_as(block) for part, block in zip(parts, like, strict=True))


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
