"""Every entry travels in two bits: what has grown past a threshold, and in which direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.compressors.base import Codec
from gossamer.compressors.quantise import moments
from gossamer.errors import require
from gossamer.kernels import Residual, twobit_decode, twobit_encode
from gossamer.kernels.spans import sendable
from gossamer.layout import Layout, Packed
from gossamer.words import At, Payload


@dataclass(frozen=True, repr=False)
class TwoBit(Codec):
    """Send t for every entry that has reached t, -t for every one that has reached -t, nothing for the others.

    C(x)_j = t if x_j >= t, -t if x_j <= -t, else 0; t = threshold, or if adaptive threshold |x|_2^2 / |x|_1 per tensor
    law:    |x_j - C(x)_j| <= max(|x_j| - t, t); adaptive: |x - C(x)|^2 <= (1 - t' (1 - t') / sqrt(n)) |x|^2, t' =
            threshold, n the tensor's entries; zeros stay zero
    bytes:  (workers - 1) ceil(N / 4), N per tensor, and 4 more per tensor if adaptive
    source: the 2-bit rule of MXNet's documentation 2018; the adaptive threshold is this library's own

    A fixed t is a speed limit: an entry that keeps above t is owed ever more, and where t is far above the gradients
    nothing is sent for a long time and then far too much. So t has to be of their size, which no default can be.

    An adaptive t is measured in each tensor, residual included, at the price of one more read of it. The unit,
    |x|_2^2 / |x|_1, is the mean magnitude weighted by magnitude. It lies between the root mean square and the maximum,
    so something is always sent and there is no state to start with or to lag behind; and it is the magnitude of the
    entries where only some differ from zero, however few. Why the law: squares of entries below t are at most t |x_j|,
    so together at most threshold of |x|_2^2; every other square shrinks by at least t |x_j|, a part t / max |x| of it;
    and t is at least threshold / sqrt(n) of the maximum. By it a residual stays bounded, at any scale.
    """

    threshold: float = 0.5
    adaptive: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            1e-30 <= self.threshold <= 1e30,
            f"threshold is what an entry has to reach to be sent, positive and in float32's range, not "
            f"{self.threshold}. Write TwoBit(threshold=0.5).",
        )
        require(
            not self.adaptive or self.threshold < 1,
            f"an adaptive threshold is a fraction of each tensor's own magnitude, below 1, not {self.threshold}: "
            "nothing may reach it otherwise. Write TwoBit(threshold=0.5, adaptive=True).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    @property
    def shards_well(self) -> bool:
        return True

    def encode(self, x: Packed, at: At, residual: Residual | None = None) -> Payload:
        sizes = x.layout.sizes
        if not self.adaptive:
            return (twobit_encode(x.flat, sizes, self._fixed(x.layout, x.flat), residual),)
        first, second = moments(x.flat, sizes, residual)
        thresholds = sendable(torch.where(first == 0, first, self.threshold * second / first))
        return thresholds, twobit_encode(x.flat, sizes, thresholds, residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        known = () if self.adaptive else (self._fixed(layout, out),)  # what everyone knows does not travel
        pairs = [(thresholds, codes) for thresholds, codes in (known + payload for payload in payloads)]
        twobit_decode(pairs, layout.sizes, out, divisor)

    def _fixed(self, layout: Layout, like: Tensor) -> Tensor:
        return like.new_full((len(layout),), self.threshold, dtype=torch.float32)
