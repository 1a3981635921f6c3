"""Shared indices: the mean of values at indices that are equal on every rank, so no indices are sent."""

from __future__ import annotations

from torch import Tensor

from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult
from gossamer.base.kernels import all_finite, within_range
from gossamer.base.ops import AllReduceMean
from gossamer.errors import NotFinite


def refuse_nonsense(x: Tensor) -> None:
    """Raise NotFinite if x has a value that cannot be sent, now or later."""
    if not all_finite(x):
        raise NotFinite("the input has a value that is not finite, or too large to be added to the residual")


def refuse_large(values: Tensor, at: AggregationContext) -> None:
    """Raise NotFinite if values are too large to be summed over the group."""
    if not within_range(values, at.world):
        raise NotFinite("the input has a value that is too large for the sum over the group")


def mean_at(values: Tensor, places: Tensor, x: Tensor, out: Tensor | None) -> Aggregation:
    """Compute the mean of values: (k,) at indices `places`: (k' <= k,) int64 of x: (n,), equal on every rank.

    Values beyond the first k' are padding.
    """
    mean_values = yield AllReduceMean(values)

    def spread(numbers: Tensor, whole: Tensor) -> Tensor:
        return whole.zero_().index_copy_(0, places, numbers[: len(places)].to(whole.dtype))

    blank = x.new_empty(0, dtype=values.dtype)
    mean = spread(mean_values, blank.new_empty(len(x)) if out is None else out)
    finite = all_finite(mean_values) and (mean.dtype == mean_values.dtype or all_finite(mean))
    return AggregationResult(
        mean=mean, own_contribution=lambda: spread(values, blank.new_empty(mean.shape)), finite=finite
    )
