"""8-bit quantization with one scale per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.compressors.decoding import pairs
from gossamer.algorithms.compressors.quantize import Quantizer, noise_key
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, int8_decode, int8_encode
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class Int8(Quantizer):
    """Send each entry in eight bits, with one float32 scale per block of each tensor.

    C(x)_j = s round(x_j / s), or s floor(x_j / s + u_j); s = max |x| / 127 over the block of `block` entries j is in
    law:    |x_j - C(x)_j| <= s / 2; stochastic: <= s, and E C(x) = x; zeros stay zero
    bytes:  (workers - 1) (N + 4 ceil(N / block)), N per tensor;
            in Sharded, which a recipe adds, about 2 / workers of that
    source: Dettmers 2016, ICLR (8-bit gradients); Dettmers et al. 2022, ICLR (blocks)

    u_j is uniform in [0, 1), with the resolution of float32. Stochastic rounding is unbiased and needs no feedback, at
    twice the mean squared error; `feedback` applies only if stochastic=False.

    Args:
        block: entries that share a scale, 1 or more.
        stochastic: whether to round at random, without bias.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.Int8(block=128)
        Int8(block=128)
    """

    block: int = 256
    stochastic: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.block >= 1,
            f"block must be the number of entries that share a scale, 1 or more, got {self.block}. "
            "Write Int8(block=256).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback and not self.stochastic

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        key = noise_key(x, at) if self.stochastic else None
        return int8_encode(x.flat, x.layout.sizes, self.block, key, residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        int8_decode(pairs(payloads), layout.sizes, self.block, out, divisor)
