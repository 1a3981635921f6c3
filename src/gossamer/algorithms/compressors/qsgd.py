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
    """Round each entry at random, without bias, to a multiple of its block's norm / `levels`.

    C(x)_j = |x| l_j / levels, l_j = floor(levels x_j / |x| + u_j), |x| over the block j is in, u_j as in Int8
    law:    E C(x) = x, E |C(x) - x|^2 <= min(d / levels^2, sqrt(d) / levels) |x|^2, d = block; zeros stay zero
    bytes:  (workers - 1) (ceil(N b / 8) + 4 ceil(N / block)), N per tensor, b the bits of 2 levels;
            in Sharded, which a recipe adds, about 2 / workers of that
    source: Alistarh et al. 2017, NeurIPS (a block is a bucket there)

    The paper calls `levels` s. It uses Elias coding, whose length depends on the values: fewer bits if most levels are
    0, as with few levels and large blocks. Here every level takes b bits, so message sizes are known in advance, equal
    on all workers, and codes can be decoded in any order.

    QSGD is unbiased and has no feedback by default. A residual only shrinks if the bound above is below 1, so
    Feedback(QSGD(...)) needs levels above sqrt(block).

    Args:
        levels: quantization steps from zero to the norm, 1 to 32767; 127 takes 8 bits an entry, 7 takes 4.
        block: entries that share a norm, a power of two.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.QSGD(levels=7)
        QSGD(levels=7)
    """

    levels: int = 127
    block: int = 512
    feedback: bool = False

    def __post_init__(self) -> None:
        require(
            1 <= self.levels < 2**15,
            f"levels must be the number of steps from zero to a block's norm, 1 to 32767, got {self.levels}. "
            "Write QSGD(levels=127) for eight bits an entry, QSGD(levels=7) for four.",
        )
        require(
            is_power_of_two(self.block) and self.block <= LARGEST_BLOCK,
            f"block must be the number of entries that share a norm, a power of two, at most {LARGEST_BLOCK}, got "
            f"{self.block}. Write QSGD(block=512).",
        )

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        return levels_encode(x.flat, x.layout.sizes, self.block, self.levels, noise_key(x, at), residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        levels_decode(pairs(payloads), layout.sizes, self.block, self.levels, out, divisor)
