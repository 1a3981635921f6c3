"""1-bit Adam: Adam's momentum travels, once its variance is frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Adam

from gossamer.compressors.base import Compressor, Ownership, with_mean_in
from gossamer.compressors.dense import Dense
from gossamer.compressors.dgc import MOMENTUM, clipped, require_clip
from gossamer.compressors.onebit import OneBit
from gossamer.compressors.wrapper import Wrapper, beside
from gossamer.core.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.core.layout import FlatTensors, Slot, accumulation_dtype
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class OneBitAdam(Wrapper):
    """Send gradients dense for `warmup` steps; then Adam's variance is frozen and its momentum travels by `inner`.

    m_i = b1 m + (1 - b1) g_i, m' = mean C(m_i), g = (m' - b1 m) / (1 - b1), with which Adam's own first moment is m'
    law:    the inner compressor's, for m_i; a recipe wraps it in Feedback where it is biased
    bytes:  2 (n-1)/n N itemsize for `warmup` steps, then the inner compressor's
    source: Tang et al. 2021, ICML

    For torch.optim.Adam and AdamW, with gossamer.attach. After the warm-up parameters move by lr m / (sqrt(v) + eps)
    with NO bias correction, neither of m nor of v: warm up for more than 1 / (1 - b2) steps, since before that v is
    still small and steps would be too long. Entries whose v is 0, such as rows of an embedding that no batch held, stay
    as they are. Weight decay, AdamW's as Adam's, does not travel.

    What comes out of backward() after the warm-up is g, mostly noise of the rounding that Adam averages away: clip here
    (each tensor's fresh gradient, to a norm of at most clip sqrt(n): see DGC) and not there.
    """

    warmup: int = 1000
    inner: Compressor = OneBit()
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            self.warmup >= 1,
            f"warmup counts the steps in which Adam's variance is found, at least 1, not {self.warmup}. "
            "Write OneBitAdam(warmup=1000), a fifth of the training or so.",
        )
        require_clip(self.clip, "OneBitAdam")

    @property
    def must_be_outermost(self) -> bool:
        return True

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        return replace(self, inner=self.inner.completed(complete))

    def owns_momentum(self, slot: Slot) -> Ownership:
        return Ownership(optimizer=Adam, start=self.warmup)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        zeros = torch.zeros_like(like.flat, dtype=accumulation_dtype(like.flat.dtype))
        return State({MOMENTUM: FlatTensors(zeros, like.layout), **self.inner.init(like, at)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        fresh = clipped(x, self.clip, at)
        if at.step >= self.warmup:
            return (yield from self._momentum(fresh, x, state, at, out))
        return (yield from beside(state, Dense().aggregate(FlatTensors(fresh, x.layout), State(), at, out)))

    def _momentum(
        self, fresh: Tensor, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation:
        before, after, keep = state[MOMENTUM].flat, state.scratch(MOMENTUM), at.momentum
        mine = before.mul(keep).add_(fresh, alpha=1 - keep)
        staged: AggregationResult = yield from self.inner.aggregate(
            FlatTensors(mine, x.layout), state.part("", MOMENTUM), at, after.flat
        )
        gradient = torch.sub(after.flat, before, alpha=keep).div_(1 - keep)

        def own() -> Tensor:  # what it differs by stays in units of m, as what is owed does
            return gradient + (staged.own - after.flat)

        following = State({MOMENTUM: after, **staged.next_state})
        return with_mean_in(replace(staged, mean=gradient, own_contribution=own, next_state=following), out)
