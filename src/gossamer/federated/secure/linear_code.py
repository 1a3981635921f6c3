"""Linear codes: what of a vector travels as numbers that can be summed at their places, and what such a sum stands for.

Projection and expansion are linear and the same on all devices of a round, so the expansion of a sum of projections is
the sum of what each alone would be read as.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.compressors import Compressor, Dense, Feedback, RandomK, Rotated, Route
from gossamer.compressors.topk import shares
from gossamer.core.aggregation import AggregationContext
from gossamer.core.layout import Layout, LayoutPart
from gossamer.errors import RecipeError
from gossamer.strategies.federated.secure_aggregation import SecureAggregation


class LinearCode(ABC):
    """A linear map from (n,) to (m,), drawn anew at each step, and one back."""

    @abstractmethod
    def count(self, layout: Layout) -> int:
        """m, which follows from the layout."""

    @abstractmethod
    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        """What travels of (n,): (m,), which may be a view of it."""

    @abstractmethod
    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        """What (m,) stands for: (n,), which may be a view of it."""


@dataclass(frozen=True)
class EveryEntry(LinearCode):
    """All n entries."""

    def count(self, layout: Layout) -> int:
        return layout.numel

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return flat

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return values


@dataclass(frozen=True)
class DrawnEntries(LinearCode):
    """The entries at the places that all draw alike; scaled, where feedback does not bring what did not travel."""

    drawn: RandomK
    scaled: bool

    def count(self, layout: Layout) -> int:
        return sum(shares(self.drawn.density, layout.sizes))

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        values = flat.index_select(0, self.drawn.places(layout, at))
        return values * self._scales(layout, values) if self.scaled else values

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return values.new_zeros(layout.numel).index_copy_(0, self.drawn.places(layout, at), values)

    def _scales(self, layout: Layout, values: Tensor) -> Tensor:
        counts = shares(self.drawn.density, layout.sizes)
        scales = [size / max(count, 1) for size, count in zip(layout.sizes, counts, strict=True)]
        return torch.tensor(scales, dtype=values.dtype).repeat_interleave(torch.tensor(counts))


@dataclass(frozen=True)
class Turned(LinearCode):
    """Another code's entries of the coefficients in another basis."""

    rotation: Rotated
    inner: LinearCode

    def count(self, layout: Layout) -> int:
        return self.inner.count(layout)

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return self.inner.project(self.rotation.turned(flat, layout, torch.empty_like(flat)), layout, at)

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        coefficients = self.inner.expand(values, layout, at)
        return self.rotation.turned(coefficients, layout, torch.empty_like(coefficients), inverse=True)


@dataclass(frozen=True)
class Divided(LinearCode):
    """Two codes, each for its own tensors."""

    route: Route
    codes: Sequence[LinearCode]

    def count(self, layout: Layout) -> int:
        return sum(code.count(part.layout) for code, part in self._parts(layout))

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return torch.cat([code.project(part.gather(flat).flat, part.layout, at) for code, part in self._parts(layout)])

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        whole = values.new_zeros(layout.numel)
        start = 0
        for code, part in self._parts(layout):
            count = code.count(part.layout)
            part.scatter(code.expand(values[start : start + count], part.layout, at), whole)
            start += count
        return whole

    def _parts(self, layout: Layout) -> list[tuple[LinearCode, LayoutPart]]:
        named = [[slot.name for slot in layout if self.route.group(slot) == way] for way in range(len(self.codes))]
        return [(code, LayoutPart.of(layout, names)) for code, names in zip(self.codes, named, strict=True) if names]


def linear_code(compressor: Compressor, secure: SecureAggregation, scaled: bool = True) -> LinearCode:
    """The code of a compressor whose messages add up. Raises RecipeError for any other, with the reason."""
    why = secure.refuses(compressor)
    if why is not None:
        raise RecipeError(why)
    match compressor:
        case Feedback(inner=inner):
            return linear_code(inner, secure, scaled=False)
        case Rotated(inner=inner):
            return Turned(compressor, linear_code(inner, secure, scaled))
        case Route(inner=inner, rest=rest):
            return Divided(compressor, [linear_code(each, secure, scaled) for each in (inner, rest)])
        case RandomK(feedback=feedback):
            return DrawnEntries(compressor, scaled and not feedback)
    assert isinstance(compressor, Dense)
    return EveryEntry()


def has_feedback(compressor: Compressor) -> bool:
    """Whether what does not travel, or is rounded away, is kept for the next time."""
    return any(isinstance(term, Feedback) for term in compressor.held())
