"""Every entry travels, in a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.compressors.base import Codec
from gossamer.errors import require
from gossamer.kernels import Residual, int8_decode, int8_encode
from gossamer.layout import Layout, Packed
from gossamer.words import At, Payload


@dataclass(frozen=True, repr=False)
class Int8(Codec):
    """Send each entry in eight bits, with one float32 scale per block of each tensor.

    C(x)_j = s round(x_j / s), s = max |x| / 127 over the block of `block` entries that j is in
    law:    |x_j - C(x)_j| <= s / 2; zeros stay zero
    bytes:  (workers - 1) (N + 4 ceil(N / block)), N per tensor
    source: Dettmers 2016, ICLR (8-bit gradients); Dettmers et al. 2022, ICLR (blocks)
    """

    block: int = 256
    feedback: bool = True

    def __post_init__(self) -> None:
        require(self.block >= 1, f"block counts the entries that share a scale, at least 1, not {self.block}")

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def encode(self, x: Packed, at: At, residual: Residual | None = None) -> Payload:
        return int8_encode(x.flat, x.layout.sizes, self.block, None, residual)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        int8_decode([(scales, codes) for scales, codes in payloads], layout.sizes, self.block, out, divisor)
