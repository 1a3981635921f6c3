"""Random-k sparsification: entries at random indices, equal on all ranks."""

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

MOST_KEPT = 2**16  # indices for which the runs are cached between steps


@dataclass(frozen=True, repr=False)
class RandomK(RandomSubspace):
    """Send k = density n random entries of each tensor, at least one, at indices that all ranks generate equally.

    C(x)_j = x_j if j is drawn, else 0; without feedback n/k x_j
    law:    E |x - C(x)|^2 = (1 - k/n) |x|^2; without feedback E C(x) = x
    bytes:  2 (n-1)/n k itemsize: no indices are sent, and values are all-reduced
    source: Stich et al. 2018, NeurIPS (rand_k); Konecny et al. 2016 (scaled)

    Directly inside Feedback nothing is scaled, whatever `feedback` is: otherwise the residual would be repaid n/k
    times.

    Args:
        density: fraction of entries to send, in (0, 1].
        feedback: whether a recipe wraps it in Feedback; if not, values are scaled by n/k to be unbiased.

    Example:
        >>> gossamer.RandomK(density=0.01)
        RandomK(density=0.01)
    """

    density: float
    feedback: bool = True

    def __post_init__(self) -> None:
        require_density(self.density, "RandomK")

    def denser(self) -> Sequence[RandomK]:
        return [replace(self, density=density) for density in densities(self.density)]

    def places(self, layout: Layout, at: AggregationContext, device: torch.device | str = "cpu") -> Tensor:
        """Return the indices for this step: (k,) int64, equal on every rank, ascending in the whole buffer."""
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
    """Draw counts[i] distinct indices of each tensor i, ascending in the whole buffer: (sum of counts,) int64.

    Each tensor, treated as a ring that starts at a uniformly drawn index, is cut into counts[i] runs of nearly equal
    length, and one index is drawn from each. So every index has exactly the probability counts[i] / sizes[i], and the
    time grows with the number of draws instead of the size of the tensor.
    """
    total = sum(counts)
    if torch.device(device).type == "meta":
        return torch.empty(total, dtype=torch.int64, device=device)
    bits = (uniform(key, total + 2 * len(counts), device) * 2.0**24).long()
    runs = (_runs if total <= MOST_KEPT else _runs.__wrapped__)(tuple(sizes), tuple(counts), torch.device(device))
    begin = bits[total:].view(2, -1)[0] * 2**24 + bits[total:].view(2, -1)[1]  # 48 bits: uniform for any tensor
    place = runs.low + (runs.length * bits[:total] >> 24)
    turned = (place + begin[runs.tensor]) % runs.size + runs.offset
    return torch.sort(turned).values


@dataclass(frozen=True)
class _Runs:
    """The run that each index is drawn from: (k,) int64 each; equal at every step."""

    tensor: Tensor  # number of the tensor
    size: Tensor  # entries of the tensor
    offset: Tensor  # of the tensor in the buffer
    low: Tensor  # offset of the run in the tensor
    length: Tensor  # of the run


@lru_cache(maxsize=64)
def _runs(sizes: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> _Runs:
    total = sum(counts)
    size, count = torch.tensor([sizes, counts], dtype=torch.int64, device=device)
    tensor = torch.arange(len(counts), device=device).repeat_interleave(count, output_size=total)
    run = torch.arange(total, device=device) - (count.cumsum(0) - count)[tensor]
    n, k = size[tensor], count[tensor]
    low, high = run * n // k, (run + 1) * n // k
    return _Runs(tensor, n, (size.cumsum(0) - size)[tensor], low, high - low)
