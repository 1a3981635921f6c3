"""Random subspaces: linear compressors that send coefficients in orthonormal directions which all ranks draw alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import Layout


class RandomSubspace(Compressor):
    """x -> S x, read as S^T S x, where the k rows of S are orthonormal and follow from the step alone.

    Both maps are linear, so the reading of a sum of messages is the sum of what each alone is read as: such messages
    may be summed by who cannot read them.
    """

    feedback: bool

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    @abstractmethod
    def coefficient_counts(self, layout: Layout) -> Sequence[int]:
        """How many numbers travel of each tensor: k together."""

    @abstractmethod
    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        """S x of x: (n,), as (k,)."""

    @abstractmethod
    def expand(self, values: Tensor, layout: Layout, at: AggregationContext, out: Tensor | None = None) -> Tensor:
        """S^T y of y: (k,), as (n,), in `out` where given."""

    def scales(self, layout: Layout, values: Tensor) -> Tensor:
        """n/k of the tensor that each of values: (k,) is a number of, by which what is read is x on average: (k,)."""
        counts = self.coefficient_counts(layout)
        scales = [size / max(count, 1) for size, count in zip(layout.sizes, counts, strict=True)]
        return torch.tensor(scales, dtype=values.dtype, device=values.device).repeat_interleave(
            torch.tensor(counts, device=values.device), output_size=len(values)
        )
