"""Every entry travels, in a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.compressors.base import Quantiser
from gossamer.core import rng
from gossamer.core.aggregation import At
from gossamer.core.layout import Layout, Packed
from gossamer.core.ops import Payload
from gossamer.errors import require
from gossamer.kernels import Residual, int8_decode, int8_encode, levels_decode, levels_encode
from gossamer.kernels.spans import LARGEST_BLOCK


def noise_key(x: Packed, at: At) -> int:
    """The address of what this worker draws for x in this step: no two workers, steps or buckets share their noise."""
    return rng.address(at.seed, at.step, at.rank, next(iter(x.layout.names), ""))


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@dataclass(frozen=True, repr=False)
class Int8(Quantiser):
    """Send each entry in eight bits, with one float32 scale per block of each tensor.

    C(x)_j = s round(x_j / s), or s floor(x_j / s + u_j); s = max |x| / 127 over the block of `block` entries j is in
    law:    |x_j - C(x)_j| <= s / 2; stochastic: <= s, and E C(x) = x; zeros stay zero
    bytes:  (workers - 1) (N + 4 ceil(N / block)), N per tensor
    source: Dettmers 2016, ICLR (8-bit gradients); Dettmers et al. 2022, ICLR (blocks)

    u_j is uniform in [0, 1), in steps that float32 cannot tell apart (kernels/noise.py). What is rounded so is right on
    average and needs no feedback, at twice the mean square error: only where it is not stochastic does `feedback` say
    whether a recipe wraps this in Feedback.
    """

    block: int = 256
    stochastic: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        require(self.block >= 1, f"block counts the entries that share a scale, at least 1, not {self.block}")

    @property
    def wants_feedback(self) -> bool:
        return self.feedback and not self.stochastic

    def encode(self, x: Packed, at: At, residual: Residual | None = None) -> Payload:
        key = noise_key(x, at) if self.stochastic else None
        return int8_encode(x.flat, x.layout.sizes, self.block, key, residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        int8_decode([(scales, codes) for scales, codes in payloads], layout.sizes, self.block, out, divisor)


@dataclass(frozen=True, repr=False)
class QSGD(Quantiser):
    """Send each entry as one of 2 levels + 1 multiples of its block's norm, at random between the two nearest.

    C(x)_j = |x| l_j / levels, l_j = floor(levels x_j / |x| + u_j), |x| over the block j is in, u_j as in Int8
    law:    E C(x) = x, E |C(x) - x|^2 <= min(d / levels^2, sqrt(d) / levels) |x|^2, d = block; zeros stay zero
    bytes:  (workers - 1) (ceil(N b / 8) + 4 ceil(N / block)), N per tensor, b the bits of 2 levels
    source: Alistarh et al. 2017, NeurIPS (a block is a bucket there)

    Right on average, so no feedback by default: a residual only shrinks where the bound above is below 1, so
    Feedback(QSGD(...)) asks for levels above sqrt(block).
    """

    levels: int = 127
    block: int = 512
    feedback: bool = False

    def __post_init__(self) -> None:
        require(
            1 <= self.levels < 2**15,
            f"levels counts the steps from zero to a block's norm, 1 to 32767, not {self.levels}. "
            "Write QSGD(levels=127) for eight bits an entry, QSGD(levels=7) for four.",
        )
        require(
            is_power_of_two(self.block) and self.block <= LARGEST_BLOCK,
            f"block counts the entries that share a norm, and their squares are summed by halves: a power of two, at "
            f"most {LARGEST_BLOCK}, not {self.block}. Write QSGD(block=512).",
        )

    def encode(self, x: Packed, at: At, residual: Residual | None = None) -> Payload:
        return levels_encode(x.flat, x.layout.sizes, self.block, self.levels, noise_key(x, at), residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        pairs = [(norms, codes) for norms, codes in payloads]
        levels_decode(pairs, layout.sizes, self.block, self.levels, out, divisor)
