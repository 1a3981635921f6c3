"""PowerSGD: matrices as two low-rank factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, mean_buffer_like, with_mean_in
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import (
    HEADROOM,
    Factoring,
    Residual,
    all_finite,
    back_project,
    expand,
    orthonormalize,
    project,
    scratch_like,
)
from gossamer.base.layout import FlatTensors, Itself, Layout, accumulation_dtype
from gossamer.base.ops import AllReduceMean
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class PowerSGD(Compressor):
    """Low-rank compression by one step of power iteration on the mean matrix, warm-started with the last right factor.

    x_i: (rows, cols)  q: (cols, rank)   p = orth(mean x_i q), q' = mean x_i^T p, mean x_i ~ p q'^T
    law:    own_i = p (x_i^T p)^T, so the mean of own is the answer, and |x - own| <= |x|
    bytes:  2 (n-1)/n itemsize (rank (rows + cols) per matrix + N of the other tensors)
    source: Vogels et al. 2019, NeurIPS; the local error as in the authors' later implementation

    The paper calls x the matrix M (n x m), the factors P and Q, and rank r. Tensors of more than two dimensions are
    reshaped to (first, rest). Tensors that two factors would not make smaller are sent uncompressed, in the first
    round.

    Args:
        rank: columns of each factor, 1 or more.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.PowerSGD(rank=2)
        PowerSGD(rank=2)
    """

    rank: int = 4
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.rank >= 1,
            f"rank must be the number of columns of a factor, 1 or more, got {self.rank}. Write PowerSGD(rank=4).",
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
        return self._aggregate(x, None, state["q"], at, out)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        return self._aggregate(x, residual, state["q"], at, out)

    def _aggregate(
        self, x: FlatTensors, residual: Residual | None, q: FlatTensors, at: AggregationContext, out: Tensor | None
    ) -> Aggregation:
        factoring = _factoring(Itself(x.layout), self.rank, q.layout.names)
        first = project(x.flat, factoring, q.flat, HEADROOM * at.world, residual)
        others = first[factoring.left_numel :].clone()  # this worker's uncompressed tensors
        first = (yield AllReduceMean(first, first)).clone()  # a sent buffer may be kept as a message
        finite = all_finite(first)  # of the mean, so the result is the same on every rank
        if not finite:
            first.zero_()
        orthonormalize(factoring, first)
        wanted, left = (x.flat, None) if residual is None else (residual.after, residual.after)
        own_factor = back_project(wanted, factoring, first, left)

        def own() -> Tensor:
            whole = scratch_like(x.flat, q.flat.dtype)
            expand(factoring, torch.cat([first[: factoring.left_numel], others]), own_factor, whole)
            return whole

        # A copy: states are written to, answers are not
        following = FlatTensors((yield AllReduceMean(own_factor)).clone(), q.layout)
        mean = mean_buffer_like(x.flat, out)
        expand(factoring, first, following.flat, mean)
        staged = AggregationResult(
            mean=mean,
            own_contribution=own,
            next_state=State({"q": following}),
            finite=finite and all_finite(following.flat),
        )
        return with_mean_in(staged, out)


@lru_cache(maxsize=256)
def _factoring(layout: Itself[Layout], rank: int, cut: tuple[str, ...]) -> Factoring:
    """Cached: the layout is the same at every step."""
    slots, names = layout.item.slots, set(cut)
    tensors = [(slot.shape, slot.stride, slot.offset) for slot in slots]
    return Factoring.of(rank, tensors, [slot.name in names for slot in slots])
