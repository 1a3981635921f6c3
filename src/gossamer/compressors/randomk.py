"""Random-k: few entries, from places that all ranks draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.compressors.base import Compressor
from gossamer.compressors.topk import require_density, share
from gossamer.core import rng
from gossamer.core.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.core.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.core.ops import AllReduceMean
from gossamer.errors import NotFinite
from gossamer.kernels import Residual, all_finite, within_range
from gossamer.kernels.reference.counter_rng import uniform


@dataclass(frozen=True, repr=False)
class RandomK(Compressor):
    """Send k = density n entries of each tensor, at least one, from places that all ranks draw alike.

    C(x)_j = x_j if j is drawn, else 0; without feedback n/k x_j
    law:    E |x - C(x)|^2 = (1 - k/n) |x|^2; without feedback E C(x) = x
    bytes:  2 (n-1)/n k itemsize: no places travel, and one mean answers for everyone
    source: Stich et al. 2018, NeurIPS; Konecny et al. 2016 (scaled)

    Right inside Feedback nothing is scaled, whatever `feedback` says: n/k times what is owed would be paid back.
    """

    density: float
    feedback: bool = True

    def __post_init__(self) -> None:
        require_density(self.density, "RandomK")

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def places(self, layout: Layout, at: AggregationContext, device: torch.device | str = "cpu") -> Tensor:
        """(k,) int64: the places drawn for this step, the same on every rank, ascending in the whole buffer."""
        key = rng.address(at.seed, at.step, layout.names[0], "places")
        return draw(layout.sizes, self._counts(layout), key, device)

    def _counts(self, layout: Layout) -> list[int]:
        return [share(self.density, size) for size in layout.sizes]

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        _refuse_nonsense(x.flat)
        places = self.places(x.layout, at, x.flat.device)
        values = x.flat[places].to(accumulation_dtype(x.flat.dtype))
        if not self.feedback:
            values *= self._scales(x.layout, values)
        return (yield from _agree(values, places, x.flat, at, out))

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        _refuse_nonsense(wanted)
        places = self.places(x.layout, at, x.flat.device)
        values = wanted[places]
        wanted.index_fill_(0, places, 0)
        return (yield from _agree(values, places, x.flat, at, out))

    def _scales(self, layout: Layout, values: Tensor) -> Tensor:
        """n/k of the tensor that each value came from: (k,)."""
        counts = self._counts(layout)
        scales = [size / max(count, 1) for size, count in zip(layout.sizes, counts, strict=True)]
        return torch.tensor(scales, dtype=values.dtype, device=values.device).repeat_interleave(
            torch.tensor(counts, device=values.device), output_size=len(values)
        )


def _refuse_nonsense(x: Tensor) -> None:
    if not all_finite(x):
        raise NotFinite("a number is not finite, or too large to be added to what is still owed")


def _agree(values: Tensor, places: Tensor, x: Tensor, at: AggregationContext, out: Tensor | None) -> Aggregation:
    """Agree on the mean of values that stand at the same places of x on every rank."""
    if not within_range(values, at.world):
        raise NotFinite("a number is too large for the sum over the group")
    told = yield AllReduceMean(values)

    def spread(numbers: Tensor, whole: Tensor) -> Tensor:
        return whole.zero_().index_copy_(0, places, numbers.to(whole.dtype))

    blank = x.new_empty(0, dtype=values.dtype)
    mean = spread(told, blank.new_empty(len(x)) if out is None else out)
    finite = all_finite(told) and (mean.dtype == told.dtype or all_finite(mean))
    return AggregationResult(
        mean=mean, own_contribution=lambda: spread(values, blank.new_empty(mean.shape)), finite=finite
    )


def draw(sizes: Sequence[int], counts: Sequence[int], key: int, device: torch.device | str = "cpu") -> Tensor:
    """counts[i] distinct places of each tensor i, ascending in the whole buffer: (sum of counts,) int64.

    Each tensor, bent to a ring that begins at a place drawn evenly, is cut into counts[i] runs as equal as can be, and
    one place is drawn from each. So every place has the chance counts[i] / sizes[i], exactly, in time that grows with
    the places drawn and not with the tensor.
    """
    total = sum(counts)
    if torch.device(device).type == "meta":
        return torch.empty(total, dtype=torch.int64, device=device)
    bits = (uniform(key, total + 2 * len(counts), device) * 2.0**24).long()
    size, count = torch.tensor([list(sizes), list(counts)], dtype=torch.int64, device=device)
    tensor = torch.arange(len(counts), device=device).repeat_interleave(count, output_size=total)
    begin = bits[total:].view(2, -1)[0] * 2**24 + bits[total:].view(2, -1)[1]  # 48 bits: even for any tensor
    run = torch.arange(total, device=device) - (count.cumsum(0) - count)[tensor]
    n, k = size[tensor], count[tensor]
    low, high = run * n // k, (run + 1) * n // k
    place = low + ((high - low) * bits[:total] >> 24)
    turned = (place + begin[tensor]) % n + (size.cumsum(0) - size)[tensor]
    return torch.sort(turned).values
