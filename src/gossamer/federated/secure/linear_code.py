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

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, Rotated, Route
from gossamer.algorithms.compressors.random_subspace import RandomSubspace
from gossamer.algorithms.strategies.federated.secure_aggregation import SecureAggregation
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import Layout, LayoutPart
from gossamer.errors import RecipeError


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
class DrawnSubspace(LinearCode):
    """Coefficients in directions that all draw alike; scaled, where feedback does not bring what did not travel."""

    drawn: RandomSubspace
    scaled: bool

    def count(self, layout: Layout) -> int:
        return sum(self.drawn.coefficient_counts(layout))

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        values = self.drawn.project(flat, layout, at)
        return values * self.drawn.scales(layout, values) if self.scaled else values

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return self.drawn.expand(values, layout, at)


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
        return [(self.codes[way], part) for way, part in self.route.parts(layout)]


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
        case RandomSubspace(feedback=feedback):
            return DrawnSubspace(compressor, scaled and not feedback)
    assert isinstance(compressor, Dense)
    return EveryEntry()


def has_feedback(compressor: Compressor) -> bool:
    """Whether what does not travel, or is rounded away, is kept for the next time."""
    return any(isinstance(term, Feedback) for term in compressor.held())
