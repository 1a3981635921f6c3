"""Random projections: low-rank compression with one factor; all ranks generate the other from the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gossamer.algorithms.compressors.random_subspace import RandomSubspace
from gossamer.algorithms.compressors.shared_places import refuse_large, refuse_nonsense
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, all_finite, scratch_for
from gossamer.base.kernels.reference.counter_rng import uniform
from gossamer.base.kernels.reference.gram_schmidt import orthonormal_columns
from gossamer.base.layout import FlatTensors, Itself, Layout, Slot, accumulation_dtype
from gossamer.base.ops import AllReduceMean
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class RandomProjection(RandomSubspace):
    """Project each matrix onto a random low-rank subspace, which all ranks generate equally in each step.

    x: (rows, cols)  q: (cols, rank)   C(x) = (x q) q^T; without feedback cols/rank (x q) q^T
    law:    E |x - C(x)|^2 = (1 - rank/cols) |x|^2; without feedback E C(x) = x
    bytes:  2 (n-1)/n itemsize (rank rows per matrix + N of the other tensors): q is not sent
    source: Konecny et al. 2016 (one factor random, from a seed); Vogels et al. 2019, NeurIPS (unbiased low rank);
            Hao et al. 2024, ICML (q resampled)

    PowerSGD adapts q to the gradients, which takes a second round. This compressor does not adapt, and its messages can
    be summed: it keeps as much of a matrix as RandomK does for as many bytes, in directions instead of entries.

    cols is the shorter side: if rows are fewer, q^T x is sent. Tensors of more than two dimensions are reshaped to
    (first, rest); tensors with a shorter side of at most rank are sent uncompressed. q has the same bits everywhere;
    products with it are summed in the order of the device's matrix product. Directly inside Feedback nothing is scaled,
    whatever `feedback` is: otherwise the residual would be repaid cols/rank times.

    Args:
        rank: columns of q, 1 or more.
        feedback: whether a recipe wraps it in Feedback; if not, the result is scaled to be unbiased.

    Example:
        >>> gossamer.RandomProjection(rank=8)
        RandomProjection(rank=8)
    """

    rank: int = 4
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.rank >= 1,
            f"rank must be the number of columns of q, 1 or more, got {self.rank}. Write RandomProjection(rank=4).",
        )

    def suits(self, shape: Sequence[int]) -> bool:
        return len(shape) >= 2 and min(_sides(shape)) > self.rank

    def coefficient_counts(self, layout: Layout) -> Sequence[int]:
        return [self.rank * max(_sides(slot.shape)) if self.suits(slot.shape) else slot.numel for slot in layout]

    def bases(self, layout: Layout, at: AggregationContext) -> dict[str, Tensor]:
        """Return q: (cols, rank) of each matrix for this step, in float64 on the CPU; the same bits on every rank."""
        return dict(_bases(Itself(layout), self, at.seed, at.step))

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        bases = self.bases(layout, at)
        return torch.cat([_projected(slot, flat, bases.get(slot.name)) for slot in layout])

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext, out: Tensor | None = None) -> Tensor:
        whole = torch.empty(layout.numel, dtype=values.dtype, device=values.device) if out is None else out
        bases = self.bases(layout, at)
        parts = values.split(list(self.coefficient_counts(layout)))
        for slot, part in zip(layout, parts, strict=True):
            _expand(slot, part, bases.get(slot.name), whole)
        return whole

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        refuse_nonsense(x.flat)
        values = self.project(x.flat.to(accumulation_dtype(x.flat.dtype)), x.layout, at)
        if not self.feedback:
            values *= self.scales(x.layout, values)
        return (yield from self._mean_of(values, x, at, out))

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        refuse_nonsense(wanted)
        values = self.project(wanted, x.layout, at)
        wanted.sub_(self._read(values, x.layout, at))
        return (yield from self._mean_of(values, x, at, out))

    def _read(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return self.expand(values, layout, at, scratch_for(layout.numel, values.dtype, values.device))

    def _mean_of(self, values: Tensor, x: FlatTensors, at: AggregationContext, out: Tensor | None) -> Aggregation:
        refuse_large(values, at)
        mean_values = yield AllReduceMean(values)
        mean = x.flat.new_empty(x.layout.numel, dtype=values.dtype) if out is None else out
        mean.copy_(self._read(mean_values, x.layout, at))
        return AggregationResult(
            mean=mean, own_contribution=lambda: self._read(values, x.layout, at), finite=all_finite(mean)
        )


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, cols) of the tensor as a matrix."""
    return shape[0], prod(shape[1:])


def _projected(slot: Slot, flat: Tensor, basis: Tensor | None) -> Tensor:
    """Return the coefficients of one tensor: (rank * longer side,), or all of its entries in memory order."""
    if basis is None:
        return slot.flat_view(flat)
    rows, cols = _sides(slot.shape)
    matrix, q = slot.view(flat).reshape(rows, cols), basis.to(flat)
    return (matrix @ q if cols <= rows else q.T @ matrix).view(-1)


def _expand(slot: Slot, values: Tensor, basis: Tensor | None, whole: Tensor) -> None:
    """Write the tensor of these coefficients to its place in `whole`: (n,)."""
    if basis is None:
        slot.flat_view(whole).copy_(values)
        return
    rows, cols = _sides(slot.shape)
    q = basis.to(values)
    matrix = values.view(rows, -1) @ q.T if cols <= rows else q @ values.view(-1, cols)
    slot.view(whole).copy_(matrix.view(slot.shape))


@lru_cache(maxsize=8)
def _bases(
    layout: Itself[Layout], projection: RandomProjection, seed: int, step: int
) -> tuple[tuple[str, Tensor], ...]:
    """Return the bases of a step. The draws are uniform in (-1, 1), symmetric around 0, so q q^T is a multiple of the
    identity on average; and multiples of 2^-24, so no library's logarithm rounds them.
    """
    matrices = [slot for slot in layout.item if projection.suits(slot.shape)]
    if not matrices:
        return ()
    draws = list(_draws(matrices, projection.rank, seed, step))
    return tuple(zip([slot.name for slot in matrices], orthonormal_columns(draws), strict=True))


def _draws(matrices: Sequence[Slot], rank: int, seed: int, step: int) -> Iterator[Tensor]:
    for slot in matrices:
        cols = min(_sides(slot.shape))
        key = rng.address(seed, step, slot.name, "basis")
        yield (uniform(key, cols * rank, "cpu").double() * 2 - (1 - 2.0**-24)).view(cols, rank)
