"""Shared places: the mean of values that stand at the same places on every rank, so that no place travels with them."""

from __future__ import annotations

from torch import Tensor

from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult
from gossamer.base.kernels import all_finite, within_range
from gossamer.base.ops import AllReduceMean
from gossamer.errors import NotFinite


def refuse_nonsense(x: Tensor) -> None:
    """Raise NotFinite where x holds a number that cannot be sent, now or later."""
    if not all_finite(x):
        raise NotFinite("a number is not finite, or too large to be added to what is still owed")


def refuse_large(values: Tensor, at: AggregationContext) -> None:
    """Raise NotFinite where values could not be added up over the group."""
    if not within_range(values, at.world):
        raise NotFinite("a number is too large for the sum over the group")


def mean_at(values: Tensor, places: Tensor, x: Tensor, out: Tensor | None) -> Aggregation:
    """Agree on the mean of values: (k,) at places: (k' <= k,) int64 of x: (n,), the same on every rank.

    What stands behind the first k' values is room that is not used.
    """
    told = yield AllReduceMean(values)

    def spread(numbers: Tensor, whole: Tensor) -> Tensor:
        return whole.zero_().index_copy_(0, places, numbers[: len(places)].to(whole.dtype))

    blank = x.new_empty(0, dtype=values.dtype)
    mean = spread(told, blank.new_empty(len(x)) if out is None else out)
    finite = all_finite(told) and (mean.dtype == told.dtype or all_finite(mean))
    return AggregationResult(
        mean=mean, own_contribution=lambda: spread(values, blank.new_empty(mean.shape)), finite=finite
    )
