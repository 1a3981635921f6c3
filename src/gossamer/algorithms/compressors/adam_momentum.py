"""Base of the compressors that send Adam's momentum."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Adam

from gossamer.algorithms.compressors.base import with_mean_in
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.dgc import MOMENTUM, clipped
from gossamer.algorithms.compressors.momentum_wrapper import MomentumWrapper
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.compressors.wrapper import without_state
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Slot, accumulation_dtype


class AdamMomentum(MomentumWrapper):
    """Send gradients uncompressed for `warmup` steps, then Adam's first moment by `inner`.

    m_i = b1 m + (1 - b1) g_i, m' = mean C(m_i), g = (m' - b1 m) / (1 - b1), with which Adam's own first moment is m'
    """

    warmup: int

    @property
    @abstractmethod
    def rule(self) -> UpdateRule:
        """The rule that updates the parameters."""

    def owns_momentum(self, slot: Slot) -> Ownership:
        return Ownership(optimizers=(Adam,), rule=self.rule, start=self.warmup)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        zeros = torch.zeros_like(like.flat, dtype=accumulation_dtype(like.flat.dtype))
        return State({MOMENTUM: FlatTensors(zeros, like.layout), **self.inner.init(like, at)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        fresh = clipped(x, self.clip, at)
        if at.step >= self.warmup:
            return (yield from self._momentum(fresh, x, state, at, out))
        return (yield from without_state(state, Dense().aggregate(FlatTensors(fresh, x.layout), State(), at, out)))

    def _momentum(
        self, fresh: Tensor, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation:
        before, after, keep = state[MOMENTUM].flat, state.scratch(MOMENTUM), at.momentum
        ratio = before.mul(keep).add_(fresh, alpha=1 - keep)
        staged: AggregationResult = yield from self.inner.aggregate(
            FlatTensors(ratio, x.layout), state.part("", MOMENTUM), at, after.flat
        )
        gradient = torch.sub(after.flat, before, alpha=keep).div_(1 - keep)

        def own() -> Tensor:  # the difference to the mean stays in units of m, as the residual does
            return gradient + (staged.own - after.flat)

        following = State({MOMENTUM: after, **staged.next_state})
        return with_mean_in(replace(staged, mean=gradient, own_contribution=own, next_state=following), out)
