"""Few entries travel, with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.compressors.base import Codec
from gossamer.errors import require
from gossamer.layout import Layout, Packed
from gossamer.words import At, Payload


@dataclass(frozen=True, repr=False)
class TopK(Codec):
    """Keep the k = density n largest entries of each tensor, at least one.

    C(x)_j = x_j if |x_j| is among the k largest, else 0
    law:    |x - C(x)|^2 <= (1 - k/n) |x|^2
    bytes:  (workers - 1) k (itemsize + 4)
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

    def encode(self, x: Packed, at: At) -> Payload:
        require(x.layout.numel < 2**31, "positions are sent as 32-bit integers: use buckets below 2^31 elements")
        places = [
            slot.span(x.flat).abs().topk(self.count(slot.numel), sorted=False).indices + slot.offset
            for slot in x.layout
        ]
        index = torch.cat(places)
        return x.flat[index], index.int()

    def accumulate(self, payloads: Sequence[Payload], layout: Layout, out: Tensor) -> None:
        for values, index in payloads:
            out.index_add_(0, index, values.to(out.dtype))
