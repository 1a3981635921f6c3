"""Sign and magnitude: every entry as its sign and one of two magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.compressors.decoding import pairs
from gossamer.algorithms.compressors.quantize import Quantizer, is_power_of_two
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, sign_magnitude_decode, sign_magnitude_encode
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class SignMagnitude(Quantizer):
    """Send each entry in two bits, its sign and a large/small flag, with two magnitudes per block.

    C(x)_j = h sign(x_j) if |x_j| > m, else l sign(x_j); m = mean |x| over the block of d entries j is in, h and l the
    means of |x| over its a entries above m and over the others
    law:    |x - C(x)|^2 = |x|^2 - a h^2 - (d - a) l^2 <= |x|^2 - d m^2 per block; blocks of zeros stay zero
    bytes:  (workers - 1) (ceil(N / 4) + 8 ceil(N / block)), N per tensor;
            in Sharded, which a recipe adds, about 2 / workers of that
    source: this library's own; BinMeans is the 2-bit code of SparseLoCo (arXiv:2508.15706, 2025)

    Designed for values that another compressor selected: Chain(TopK(density=0.01), SignMagnitude()). The largest
    entries of a tensor have similar magnitudes, except for a few far above the others.

    Args:
        block: entries that share two magnitudes, a power of two, 8 or more.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.Chain(gossamer.TopK(density=0.01), gossamer.SignMagnitude())
        Chain(TopK(density=0.01), SignMagnitude())
    """

    block: int = 512
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            is_power_of_two(self.block) and 8 <= self.block <= LARGEST_BLOCK,
            f"block must be the number of entries that share two magnitudes, a power of two from 8 to {LARGEST_BLOCK}, "
            f"got {self.block}. Write SignMagnitude(block=512).",
        )

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        return sign_magnitude_encode(x.flat, x.layout.sizes, self.block, residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        sign_magnitude_decode(pairs(payloads), layout.sizes, self.block, out, divisor)
