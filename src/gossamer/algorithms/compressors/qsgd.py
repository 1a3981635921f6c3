"""QSGD: stochastic quantization to a few levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.compressors.decoding import pairs
from gossamer.algorithms.compressors.quantize import Quantizer, is_power_of_two, noise_key
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, levels_decode, levels_encode
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class QSGD(Quantizer):
    """Send each entry as one of 2 levels + 1 multiples of its block's norm, at random between the two nearest.

    C(x)_j = |x| l_j / levels, l_j = floor(levels x_j / |x| + u_j), |x| over the block j is in, u_j as in Int8
    law:    E C(x) = x, E |C(x) - x|^2 <= min(d / levels^2, sqrt(d) / levels) |x|^2, d = block; zeros stay zero
    bytes:  (workers - 1) (ceil(N b / 8) + 4 ceil(N / block)), N per tensor, b the bits of 2 levels
    source: Alistarh et al. 2017, NeurIPS (a block is a bucket there)

    The paper codes levels by Elias' rule, whose length depends on the numbers: fewer bits where most levels are 0, as
    with few levels and large blocks. Here every level takes the same b bits, so that sizes are known beforehand, all
    workers' are equal, and codes are read in any order.

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

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        return levels_encode(x.flat, x.layout.sizes, self.block, self.levels, noise_key(x, at), residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        levels_decode(pairs(payloads), layout.sizes, self.block, self.levels, out, divisor)
