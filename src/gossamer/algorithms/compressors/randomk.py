"""Random-k: few entries, from places that all ranks draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.algorithms.compressors.random_subspace import RandomSubspace
from gossamer.algorithms.compressors.shared_places import mean_at, refuse_large, refuse_nonsense
from gossamer.algorithms.compressors.topk import densities, require_density, shares
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.kernels import Residual
from gossamer.base.kernels.reference.counter_rng import uniform
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype

MOST_KEPT = 2**16  # places whose runs are remembered from step to step


@dataclass(frozen=True, repr=False)
class RandomK(RandomSubspace):
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

    def denser(self) -> Sequence[RandomK]:
        return [replace(self, density=density) for density in densities(self.density)]

    def places(self, layout: Layout, at: AggregationContext, device: torch.device | str = "cpu") -> Tensor:
        """(k,) int64: the places drawn for this step, the same on every rank, ascending in the whole buffer."""
        key = rng.address(at.seed, at.step, layout.names[0], "places")
        return draw(layout.sizes, self.coefficient_counts(layout), key, device)

    def coefficient_counts(self, layout: Layout) -> tuple[int, ...]:
        return shares(self.density, layout.sizes)

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return flat.index_select(0, self.places(layout, at, flat.device))

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext, out: Tensor | None = None) -> Tensor:
        whole = values.new_empty(layout.numel) if out is None else out
        return whole.zero_().index_copy_(0, self.places(layout, at, values.device), values)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        refuse_nonsense(x.flat)
        places = self.places(x.layout, at, x.flat.device)
        values = x.flat.index_select(0, places).to(accumulation_dtype(x.flat.dtype))
        if not self.feedback:
            values *= self.scales(x.layout, values)
        refuse_large(values, at)
        return (yield from mean_at(values, places, x.flat, out))

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        refuse_nonsense(wanted)
        places = self.places(x.layout, at, x.flat.device)
        values = wanted.index_select(0, places)
        wanted.index_fill_(0, places, 0)
        refuse_large(values, at)
        return (yield from mean_at(values, places, x.flat, out))


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
    runs = (_runs if total <= MOST_KEPT else _runs.__wrapped__)(tuple(sizes), tuple(counts), torch.device(device))
    begin = bits[total:].view(2, -1)[0] * 2**24 + bits[total:].view(2, -1)[1]  # 48 bits: even for any tensor
    place = runs.low + (runs.length * bits[:total] >> 24)
    turned = (place + begin[runs.tensor]) % runs.size + runs.offset
    return torch.sort(turned).values


@dataclass(frozen=True)
class _Runs:
    """What each place is drawn from: (k,) int64 each. The same at every step."""

    tensor: Tensor  # its number
    size: Tensor  # its entries
    offset: Tensor  # where it begins in the buffer
    low: Tensor  # where the run begins in the tensor
    length: Tensor  # the run's


@lru_cache(maxsize=64)
def _runs(sizes: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> _Runs:
    total = sum(counts)
    size, count = torch.tensor([sizes, counts], dtype=torch.int64, device=device)
    tensor = torch.arange(len(counts), device=device).repeat_interleave(count, output_size=total)
    run = torch.arange(total, device=device) - (count.cumsum(0) - count)[tensor]
    n, k = size[tensor], count[tensor]
    low, high = run * n // k, (run + 1) * n // k
    return _Runs(tensor, n, (size.cumsum(0) - size)[tensor], low, high - low)
