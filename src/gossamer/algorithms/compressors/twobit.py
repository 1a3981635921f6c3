"""2-bit quantization: sends the sign of each entry whose magnitude reaches a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import pairs
from gossamer.algorithms.compressors.quantize import Quantizer, is_power_of_two
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, twobit_decode, twobit_encode, twobit_measured_encode
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK, blocks
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class TwoBit(Quantizer):
    """Send t for every entry that is at least t, -t for every entry that is at most -t, and 0 for the others.

    C(x)_j = t if x_j >= t, -t if x_j <= -t, else 0; t = threshold, or if adaptive threshold |x|_2^2 / |x|_1 over the
    block j is in
    law:    |x_j - C(x)_j| <= max(|x_j| - t, t); adaptive: |x - C(x)|^2 <= (1 - t' (1 - t') / sqrt(d)) |x|^2 in every
            block of d entries, t' = threshold; zeros stay zero
    bytes:  (workers - 1) ceil(N / 4), N per tensor, and if adaptive 4 ceil(N / block) more;
            in Sharded, which a recipe adds, about 2 / workers of that
    source: the 2-bit rule of MXNet's documentation 2018; the adaptive threshold is this library's own

    A fixed t limits the rate: the residual of an entry that stays above t grows without limit, and with t far above the
    gradients, nothing is sent for a long time and then far too much. So t must match the size of the gradients, and no
    default can.

    An adaptive t is measured per block, residual included, while the block is in the first-level cache for encoding, so
    memory is read once. The unit, |x|_2^2 / |x|_1, is the mean magnitude weighted by magnitude. It is between the root
    mean square and the maximum, so at least one entry is always sent, and there is no state. If only some entries
    differ from zero, it is the magnitude of those, however few.

    Proof of the law: the squares of entries below t are at most t |x_j|, so together at most threshold of |x|_2^2;
    every other square decreases by at least t |x_j|, a fraction t / max |x| of it; and t is at least threshold /
    sqrt(d) of the maximum. So the residual is bounded, at any scale. Smaller blocks reduce it faster: the law of a
    block of all entries follows from theirs.

    Args:
        threshold: t; or if adaptive a fraction of the unit, below 1.
        adaptive: whether t is measured per block.
        block: entries that share an adaptive threshold, a power of two, 8 or more.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.TwoBit(threshold=0.5, adaptive=True)
        TwoBit(adaptive=True)
    """

    threshold: float = 0.5
    adaptive: bool = False
    block: int = 2048
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            1e-30 <= self.threshold <= 1e30,
            f"threshold must be the magnitude at which entries are sent, positive and in float32's range, got "
            f"{self.threshold}. Write TwoBit(threshold=0.5).",
        )
        require(
            is_power_of_two(self.block) and 8 <= self.block <= LARGEST_BLOCK,
            f"block must be the number of entries that share an adaptive threshold, a power of two from 8 to "
            f"{LARGEST_BLOCK}, got {self.block}. Write TwoBit(threshold=0.5, adaptive=True, block=2048).",
        )
        require(
            not self.adaptive or self.threshold < 1,
            f"an adaptive threshold must be a fraction of the block's magnitude, below 1, got {self.threshold}: no "
            "entry might reach it otherwise. Write TwoBit(threshold=0.5, adaptive=True).",
        )

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        sizes = x.layout.sizes
        if self.adaptive:
            return twobit_measured_encode(x.flat, sizes, self.block, self.threshold, residual)
        return (twobit_encode(x.flat, sizes, self.block, self._fixed(x.layout, x.flat), residual),)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        known = () if self.adaptive else (self._fixed(layout, out),)  # a fixed threshold is not sent
        twobit_decode(pairs([known + payload for payload in payloads]), layout.sizes, self.block, out, divisor)

    def _fixed(self, layout: Layout, like: Tensor) -> Tensor:
        return like.new_full((_blocks(layout.sizes, self.block),), self.threshold, dtype=torch.float32)


_blocks = lru_cache(maxsize=1024)(blocks)
