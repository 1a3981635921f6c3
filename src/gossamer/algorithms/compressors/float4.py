"""Float4: every entry as a sign and a power of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.compressors.decoding import pairs
from gossamer.algorithms.compressors.quantize import Quantizer
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, float4_decode, float4_encode
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class Float4(Quantizer):
    """Send each entry in four bits, a sign and an exponent, with one float32 scale per block of each tensor.

    C(x)_j = sign(x_j) s m_j, m_j the nearest to |x_j| / s of 0, 1/64, 1/32, ..., 1/2, 1 (of two, the larger); s =
    max |x| over the block of `block` entries j is in
    law:    |x_j - C(x)_j| <= min(|x_j|, max(|x_j| / 3, s / 128)), so that |x - C(x)|^2 <= |x|^2 - s^2 per block; zeros
            stay zero
    bytes:  (workers - 1) (ceil(N / 2) + 4 ceil(N / block)), N per tensor; in Sharded, which a recipe adds, about
            2 / workers of that: N (workers - 1) / workers, 1/8 of a float32 ring
    source: Douillard et al. 2025, arXiv:2501.18512 (E3M0 for pseudo-gradients, summed in float32; the blocks are this
            library's)

    The relative error is the same for small and large entries, down to 1/128 of the block's largest. That suits
    pseudo-gradients (differences of parameters), whose entries differ by orders of magnitude, and averaging over
    several workers reduces the error. Sums are in float32; only messages are quantized.

    Args:
        block: entries that share a scale, an even number.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.DiLoCo(period=20) + gossamer.Float4()
        DiLoCo(period=20) + Float4()
    """

    block: int = 256
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.block >= 2 and self.block % 2 == 0,
            f"block must be the number of entries that share a scale, even since two entries share a byte, 2 or more, "
            f"got {self.block}. Write Float4(block=256).",
        )

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        return float4_encode(x.flat, x.layout.sizes, self.block, residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        float4_decode(pairs(payloads), layout.sizes, self.block, out, divisor)
