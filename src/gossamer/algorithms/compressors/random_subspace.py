"""Random subspaces: linear compressors that send coefficients of orthonormal directions which all ranks generate
equally.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import Layout


class RandomSubspace(Compressor):
    """Send S x, decoded as S^T S x, where the k rows of S are orthonormal and depend on the step alone.

    Both maps are linear, so the decoded sum of messages is the sum of the decoded messages: a party that cannot decode
    them, such as a secure aggregator, can sum them.
    """

    feedback: bool

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    @abstractmethod
    def coefficient_counts(self, layout: Layout) -> Sequence[int]:
        """Return the number of coefficients sent of each tensor: k together."""

    @abstractmethod
    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        """Return S x of x: (n,), as (k,)."""

    @abstractmethod
    def expand(self, values: Tensor, layout: Layout, at: AggregationContext, out: Tensor | None = None) -> Tensor:
        """Return S^T y of y: (k,), as (n,), in `out` if given."""

    def scales(self, layout: Layout, values: Tensor) -> Tensor:
        """Return n/k of the tensor of each coefficient: (k,). Scaled by it, the decoded tensor is x on average."""
        counts = self.coefficient_counts(layout)
        scales = [size / max(count, 1) for size, count in zip(layout.sizes, counts, strict=True)]
        return torch.tensor(scales, dtype=values.dtype, device=values.device).repeat_interleave(
            torch.tensor(counts, device=values.device), output_size=len(values)
        )
