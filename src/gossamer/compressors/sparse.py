"""Few entries travel, with their places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.compressors.base import Codec
from gossamer.errors import require
from gossamer.kernels import Residual, encode_places, largest, sparse_decode
from gossamer.layout import Layout, Packed
from gossamer.words import At, Payload


class Sparse(Codec):
    """A codec that takes a known number of entries and sends their values and their places, the latter in few bits."""

    @abstractmethod
    def select(self, x: Packed, at: At, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        """(places, values) of what travels: (k,) int32, ascending, and (k,); as `encode` otherwise."""

    def encode(self, x: Packed, at: At, residual: Residual | None = None) -> Payload:
        require(x.layout.numel < 2**31, "places are 32-bit integers: use buckets below 2^31 elements")
        places, values = self.select(x, at, residual)
        return values, encode_places(places, x.layout.numel)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        sparse_decode([(values, coded) for values, coded in payloads], out, divisor)


@dataclass(frozen=True, repr=False)
class TopK(Sparse):
    """Keep the k = density n largest entries of each tensor, at least one; among equals the first ones.

    C(x)_j = x_j if |x_j| is among the k largest, else 0
    law:    |x - C(x)|^2 <= (1 - k/n) |x|^2
    bytes:  (workers - 1) (k itemsize + coded_bytes(k, N)), N of all tensors together: about 2 + log2(N/k) bits a place
    source: Aji & Heafield 2017, EMNLP; Stich et al. 2018, NeurIPS
    """

    density: float
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            0 < self.density <= 1,
            f"density is the fraction of entries that travel, in (0, 1], not {self.density}. "
            "Write TopK(density=0.01) for one in a hundred.",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def count(self, numel: int) -> int:
        """How many of `numel` entries travel."""
        return min(numel, max(1, round(self.density * numel)))

    def select(self, x: Packed, at: At, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        return largest(x.flat, x.layout.sizes, [self.count(size) for size in x.layout.sizes], residual)
