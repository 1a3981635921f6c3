"""2-bit quantization: which entries have grown past a threshold, and in which direction."""

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
    """Send t for every entry that has reached t, -t for every one that has reached -t, nothing for the others.

    C(x)_j = t if x_j >= t, -t if x_j <= -t, else 0; t = threshold, or if adaptive threshold |x|_2^2 / |x|_1 over the
    block j is in
    law:    |x_j - C(x)_j| <= max(|x_j| - t, t); adaptive: |x - C(x)|^2 <= (1 - t' (1 - t') / sqrt(d)) |x|^2 in every
            block of d entries, t' = threshold; zeros stay zero
    bytes:  (workers - 1) ceil(N / 4), N per tensor, and if adaptive 4 ceil(N / block) more
    source: the 2-bit rule of MXNet's documentation 2018; the adaptive threshold is this library's own

    A fixed t is a speed limit: an entry that keeps above t is owed ever more, and where t is far above the gradients
    nothing is sent for a long time and then far too much. So t has to be of their size, which no default can be.

    An adaptive t is measured in each block, residual included, while that is in the first cache on its way to being
    encoded: memory is read once. The unit, |x|_2^2 / |x|_1, is the mean magnitude weighted by magnitude. It lies
    between the root mean square and the maximum, so something is always sent and there is no state to start with or to
    lag behind; and it is the magnitude of the entries where only some differ from zero, however few. Why the law:
    squares of entries below t are at most t |x_j|, so together at most threshold of |x|_2^2; every other square shrinks
    by at least t |x_j|, a part t / max |x| of it; and t is at least threshold / sqrt(d) of the maximum. By it a
    residual stays bounded, at any scale. Smaller blocks shrink it faster: the law of a block of all entries follows
    from theirs.
    """

    threshold: float = 0.5
    adaptive: bool = False
    block: int = 2048
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            1e-30 <= self.threshold <= 1e30,
            f"threshold is what an entry has to reach to be sent, positive and in float32's range, not "
            f"{self.threshold}. Write TwoBit(threshold=0.5).",
        )
        require(
            is_power_of_two(self.block) and 8 <= self.block <= LARGEST_BLOCK,
            f"block counts the entries that share an adaptive threshold, and they are summed by halves: a power of two "
            f"from 8 to {LARGEST_BLOCK}, not {self.block}. Write TwoBit(threshold=0.5, adaptive=True, block=2048).",
        )
        require(
            not self.adaptive or self.threshold < 1,
            f"an adaptive threshold is a fraction of each tensor's own magnitude, below 1, not {self.threshold}: "
            "nothing may reach it otherwise. Write TwoBit(threshold=0.5, adaptive=True).",
        )

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        sizes = x.layout.sizes
        if self.adaptive:
            return twobit_measured_encode(x.flat, sizes, self.block, self.threshold, residual)
        return (twobit_encode(x.flat, sizes, self.block, self._fixed(x.layout, x.flat), residual),)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        known = () if self.adaptive else (self._fixed(layout, out),)  # a threshold that all ranks know does not travel
        twobit_decode(pairs([known + payload for payload in payloads]), layout.sizes, self.block, out, divisor)

    def _fixed(self, layout: Layout, like: Tensor) -> Tensor:
        return like.new_full((_blocks(layout.sizes, self.block),), self.threshold, dtype=torch.float32)


_blocks = lru_cache(maxsize=1024)(blocks)  # the same at every step
