"""PowerSGD: matrices as two thin factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.compressors.base import Compressor
from gossamer.core import rng
from gossamer.core.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.core.layout import FlatTensors, Layout, Slot, accumulation_dtype
from gossamer.core.ops import AllReduceMean
from gossamer.errors import NotFinite, require
from gossamer.kernels import HEADROOM, all_finite, orthonormal, within_range


@dataclass(frozen=True, repr=False)
class PowerSGD(Compressor):
    """One step of power iteration on the mean matrix, started from the last one's factor.

    x_i: (rows, cols)  q: (cols, rank)   p = orth(mean x_i q), q' = mean x_i^T p, mean x_i ~ p q'^T
    law:    own_i = p (x_i^T p)^T, so the mean of own is the answer, and |x - own| <= |x|
    bytes:  2 (n-1)/n itemsize (rank (rows + cols) per matrix + N of the tensors that are none)
    source: Vogels et al. 2019, NeurIPS; the local error as in the authors' later implementation

    Tensors of more than two dimensions are seen as (first, everything else). Those that two factors would not make
    smaller travel dense, in the first round.
    """

    rank: int = 4
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.rank >= 1,
            f"rank counts the columns of a factor, at least 1, not {self.rank}. Write PowerSGD(rank=4).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def suits(self, shape: Sequence[int]) -> bool:
        if len(shape) < 2 or prod(shape) == 0:
            return False
        rows, cols = shape[0], prod(shape[1:])
        return self.rank * (rows + cols) < rows * cols

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        shapes = {slot.name: (prod(slot.shape[1:]), self.rank) for slot in like.layout if self.suits(slot.shape)}
        q = FlatTensors.zeros(Layout.of(shapes), dtype=accumulation_dtype(like.flat.dtype), device=like.flat.device)
        for name, view in q.items():
            draws = rng.generator(at.seed, name, "q")
            view.copy_(torch.randn(view.shape, generator=draws, dtype=view.dtype, device="cpu"))
        return State({"q": q})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if not within_range(x.flat, HEADROOM * at.world):
            raise NotFinite("a number is not finite, or too large for sums over the group")
        q = state["q"]
        matrices = [slot for slot in x.layout if slot.name in q.layout.by_name]
        others = [slot for slot in x.layout if slot.name not in q.layout.by_name]
        xs = {slot.name: _matrix(slot, x.flat).to(q.flat.dtype) for slot in matrices}

        first = torch.cat(
            [(xs[slot.name] @ q[slot.name]).view(-1) for slot in matrices]
            + [slot.flat_view(x.flat).to(q.flat.dtype) for slot in others]
        )
        plain = {slot.name: slot.flat_view(x.flat).to(q.flat.dtype, copy=True) for slot in others}
        first = yield AllReduceMean(first, first)
        parts = first.split([slot.shape[0] * self.rank for slot in matrices] + [slot.numel for slot in others])
        finite = all_finite(first)  # of the mean, so every rank comes to the same conclusion
        if not finite:
            first.zero_()
        thin = [part.view(-1, self.rank) for part in parts[: len(matrices)]]
        ps = dict(zip((slot.name for slot in matrices), orthonormal(thin) if thin else [], strict=True))

        mine = FlatTensors(torch.empty_like(q.flat), q.layout)
        for name, p in ps.items():
            torch.mm(xs[name].T, p, out=mine[name])

        def own() -> Tensor:
            whole = torch.empty_like(x.flat, dtype=q.flat.dtype)
            for slot in matrices:
                _write(slot, whole, ps[slot.name] @ mine[slot.name].T)
            for slot in others:
                slot.flat_view(whole).copy_(plain[slot.name])
            return whole

        following = FlatTensors((yield AllReduceMean(mine.flat)), q.layout)

        mean = torch.empty_like(x.flat) if out is None else out
        for slot in matrices:
            _write(slot, mean, ps[slot.name] @ following[slot.name].T)
        for slot, part in zip(others, parts[len(matrices) :], strict=True):
            slot.flat_view(mean).copy_(part)
        return AggregationResult(
            mean=mean,
            own_contribution=own,
            next_state=State({"q": following}),
            finite=finite and all_finite(following.flat),
        )


def _matrix(slot: Slot, flat: Tensor) -> Tensor:
    return slot.view(flat).reshape(slot.shape[0], -1)


def _write(slot: Slot, flat: Tensor, matrix: Tensor) -> None:
    slot.view(flat).copy_(matrix.view(slot.shape))
