"""ARC-Top-K: select the rows that are largest in an all-reduced sketch, so that no indices are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.shared_places import mean_at
from gossamer.algorithms.compressors.topk import require_density, shares
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, all_finite, largest, within_range
from gossamer.base.kernels.reference.counter_rng import uniform
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import AllReduceMean
from gossamer.errors import NotFinite, require

SKETCH = torch.bfloat16  # float32's range in half its bytes; the low bits do not change the ranking of rows


@dataclass(frozen=True, repr=False)
class ARCTopK(Compressor):
    """Send the K = density m rows of each tensor that are largest in a sketch of the mean, equal on all ranks.

    x: (m, row), in memory order  v: (row/rank) random signs, resampled each step, equal on every rank
    s = sum over the rank pieces of a row of (v . mean piece)^2, so E s = |mean row|^2; C(x) = x in the K largest s
    law:    C of the mean is the mean of C, and E |mean - C(mean)|^2 <= (1 - rank K / (row m)) |mean|^2
    bytes:  2 (n-1)/n (2 rank m + K row itemsize), and never more than Dense: flat in the number of workers n
    source: Chen et al. 2025, arXiv:2510.26709 (there with a Gaussian v; the law with this factor is shown here)

    The factor holds for any mean; without `rank / row` it would not, since similar rows are misjudged together. With
    signs, each number of a sketch is one sum over row / rank adjacent entries, computed at memory bandwidth.

    The authors train with a fifth of the rows. With 1 %, whole rows are too coarse for small layers. Final loss, and
    bytes per step, of four workers with AdamW:

                   digits-conv, 200 steps    bytelm, 100 steps
        ARCTopK    0.18, 2.7 kB              3.36, 50 kB (one seed)
        RandomK    0.16, 2.1 kB              4.00, 36 kB
        TopK       0.014, 3 kB               3.07, 58 kB

    Args:
        density: fraction of rows to send, in (0, 1].
        row: entries per row.
        rank: numbers per row of the sketch; divides `row`.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.ARCTopK(density=0.05)
        ARCTopK(density=0.05)
    """

    density: float
    row: int = 64
    rank: int = 1
    feedback: bool = True

    def __post_init__(self) -> None:
        require_density(self.density, "ARCTopK")
        require(
            self.row >= 1 and self.rank >= 1 and self.row % self.rank == 0,
            f"rank must divide row, since a row is cut into `rank` equal pieces, got row={self.row}, rank={self.rank}. "
            f"Write ARCTopK(density={self.density}, row=64, rank=1).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def suits(self, shape: Sequence[int]) -> bool:
        return prod(shape) > self.row

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if self._dearer_than_dense(x):
            return Dense().aggregate(x, State(), at, out)
        return self._agreed(x, x.flat.to(accumulation_dtype(x.flat.dtype)), at, out, waits=False)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        if self._dearer_than_dense(x):
            return Dense().aggregate_compensated(x, residual, State(), at, out)
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        return self._agreed(x, wanted, at, out, waits=True)

    def _rows(self, layout: Layout) -> RowBlocks:
        return row_blocks(layout.sizes, self.row)

    def _dearer_than_dense(self, x: FlatTensors) -> bool:
        """Also true if the sketch alone costs more; both costs have the factor 2 (n-1)/n."""
        rows, itemsize = self._rows(x.layout), accumulation_dtype(x.flat.dtype).itemsize
        chosen = sum(shares(self.density, rows.counts)) * self.row * itemsize
        return chosen + rows.total * self.rank * SKETCH.itemsize >= x.layout.numel * itemsize

    def _agreed(
        self, x: FlatTensors, wanted: Tensor, at: AggregationContext, out: Tensor | None, *, waits: bool
    ) -> Aggregation:
        """Compute the mean of wanted: (n,). waits: leave the unsent part in `wanted`; sent entries become zero."""
        rows = self._rows(x.layout)
        key = rng.address(at.seed, at.step, x.layout.names[0], "signs")
        sketch_values = rows.sketch(wanted, signs(key, self.row // self.rank, wanted)).to(SKETCH)
        if not within_range(sketch_values, at.world):
            raise NotFinite("the input has a value that is not finite, or too large for sums over a row and the group")
        received = yield AllReduceMean(sketch_values, sketch_values)
        drawable = all_finite(received)
        if not drawable:
            received.zero_()
        chosen, _ = largest(squared_norms(received), rows.counts, shares(self.density, rows.counts))
        places = rows.places(chosen)
        values = wanted.new_zeros(len(chosen) * self.row)
        torch.index_select(wanted, 0, places, out=values[: len(places)])
        if waits:
            wanted.index_fill_(0, places, 0)
        staged: AggregationResult = yield from mean_at(values, places, x.flat, out)
        return replace(staged, finite=staged.finite and drawable)


# -- rows and their sketches -------------------------------------------------------------------------------------------


SMALL = 2**14  # entries; for smaller tensors, a function call takes longer than a copy


@dataclass(frozen=True)
class RowBlocks:
    """Tensors of these sizes, each cut into rows of `row` entries in memory order; the last row may be shorter."""

    sizes: tuple[int, ...]
    row: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of rows of each tensor."""
        return tuple(-(-size // self.row) for size in self.sizes)

    @cached_property
    def total(self) -> int:
        return sum(self.counts)

    @cached_property
    def _even(self) -> bool:
        return all(size % self.row == 0 for size in self.sizes)

    @cached_property
    def _spans(self) -> tuple[tuple[int, int, int], ...]:
        """(begin, end, first row) of tensors whose rows are contiguous, merged to reduce the number of calls."""
        found: list[tuple[int, int, int]] = []
        begin = row = 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            if found and (begin - found[-1][0]) % self.row == 0:
                found[-1] = (found[-1][0], begin + size, found[-1][2])
            else:
                found.append((begin, begin + size, row))
            begin, row = begin + size, row + count
        return tuple(found)

    @cached_property
    def _many_small(self) -> bool:
        return len(self._spans) > 1 and sum(self.sizes) < SMALL * len(self._spans)

    def _filled_up(self, x: Tensor) -> Tensor:
        """Return a copy of x: (n,) with each tensor padded with zeros to whole rows: (total row,)."""
        filled = x.new_zeros(self.total * self.row)
        gaps = [(size, count * self.row - size) for size, count in zip(self.sizes, self.counts, strict=True)]
        torch._foreach_copy_(list(filled.split([size for gap in gaps for size in gap])[::2]), x.split(list(self.sizes)))
        return filled

    def places(self, rows: Tensor) -> Tensor:
        """Return the indices of the entries of some rows, ascending in the whole buffer: (k',) int64, k' <= len(rows)
        row.
        """
        columns = torch.arange(self.row, device=rows.device)
        if self._even or rows.is_meta:
            return (rows.long()[:, None] * self.row + columns).view(-1)
        rows = rows.long()
        size, count = torch.tensor([self.sizes, self.counts], device=rows.device).unbind()
        tensor = torch.searchsorted(count.cumsum(0), rows, right=True)
        start = (size.cumsum(0) - size)[tensor] + (rows - (count.cumsum(0) - count)[tensor]) * self.row
        every: Tensor = start[:, None] + columns
        return every[every < size.cumsum(0)[tensor][:, None]]

    def sketch(self, x: Tensor, signs: Tensor) -> Tensor:
        """Return signs . piece for each piece of len(signs) entries of every row: (total, pieces), zero beyond a
        tensor's end.

        One pass over x: (n,) at memory bandwidth, or three passes for many small tensors. signs: (row / pieces,).
        """
        if self._many_small:
            return row_blocks((self.total * self.row,), self.row).sketch(self._filled_up(x), signs)
        piece = len(signs)
        pieces = self.row // piece
        found = x.new_zeros(self.total * pieces)
        for begin, end, first in self._spans:
            whole, rest = divmod(end - begin, piece)
            middle, into = end - rest, first * pieces
            if whole:
                torch.mv(x[begin:middle].view(whole, piece), signs, out=found[into : into + whole])
            if rest:
                found[into + whole] = torch.dot(x[middle:end], signs[:rest])
        return found.view(self.total, pieces)


@lru_cache(maxsize=256)
def row_blocks(sizes: tuple[int, ...], row: int) -> RowBlocks:
    """Cached: the sizes are the same at every step."""
    return RowBlocks(sizes, row)


def signs(key: int, count: int, like: Tensor) -> Tensor:
    """Return (count,) of -1 and 1 in like's dtype, with equal probability, from a 63-bit key."""
    return (uniform(key, count, like.device) >= 0.5).to(like.dtype).mul_(2).sub_(1)


def squared_norms(sketch: Tensor) -> Tensor:
    """Return values proportional to the rows' squared norms, without overflow: (rows, pieces) -> (rows,) float32."""
    found = sketch.float()
    if found.is_meta or not found.numel():
        return found.new_empty(len(found))
    peak = found.abs().amax()
    return found.div_(peak.clamp(min=torch.finfo(found.dtype).tiny)).square_().sum(1)
