"""Adam's update as what travels: every worker makes it of its own gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Adam

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dgc import MOMENTUM, clipped
from gossamer.algorithms.compressors.momentum_wrapper import MomentumWrapper
from gossamer.algorithms.compressors.onebit import OneBit
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Slot, accumulation_dtype

VARIANCE = "variance"


@dataclass(frozen=True, repr=False)
class AdamUpdate(MomentumWrapper):
    """Let every worker make Adam's update of its own gradients, and send that by `inner`.

    m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2, C(m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps)); p -= lr mean
    law:    the inner compressor's, for the update; a recipe wraps it in Feedback where it is biased
    bytes:  the inner compressor's; memory: 4 N of at least float32, which take turns in pairs, and the inner one's
    source: Chen et al. 2021, arXiv 2004.14180; Chen et al. 2022, arXiv 2205.14473

    For torch.optim.AdamW, and Adam without weight decay, with gossamer.attach: betas and eps are the optimizer's at
    each step, the learning rate and weight decay stay with it. What waits in feedback waits as a part of an update, in
    which all entries count alike: large and small gradients have equal chances to travel, and what arrives late is in
    no variance. The moments are each worker's own, t counts all steps, and after session.close() the optimizer's begin
    at zero.

    Not the same as Adam of the mean, also with inner=Dense(): v holds the noise of one worker's gradients, n times
    that of their mean, so updates are shorter by up to sqrt(n). Try a learning rate up to sqrt(n) times as large. A
    factor of a gradient cancels out, so weights of unequal batches do not count.

    Where few entries travel, all may at first: AdamUpdate(Warmup(TopK(density=0.01), steps=500)). Where all travel in
    few bits, entries that no batch ever used move back and forth by less than a step.

    clip: of each tensor's fresh gradient, to a norm of at most clip sqrt(n): see DGC.
    """

    inner: Compressor = OneBit()
    clip: float | None = None

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input

    def owns_momentum(self, slot: Slot) -> Ownership:
        return Ownership(optimizers=(Adam,), rule=UpdateRule.STEP)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        zeros = torch.zeros_like(like.flat, dtype=accumulation_dtype(like.flat.dtype))
        own = {MOMENTUM: FlatTensors(zeros, like.layout), VARIANCE: FlatTensors(zeros.clone(), like.layout)}
        return State({**own, **self.inner.init(like, at)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        fresh, steps = clipped(x, self.clip, at), at.step + 1
        moment, variance = state.scratch(MOMENTUM), state.scratch(VARIANCE)
        torch.mul(state[MOMENTUM].flat, at.momentum, out=moment.flat).add_(fresh, alpha=1 - at.momentum)
        torch.mul(state[VARIANCE].flat, at.second_beta, out=variance.flat).addcmul_(
            fresh, fresh, value=1 - at.second_beta
        )
        divisor = (variance.flat / (1 - at.second_beta**steps)).sqrt_().add_(at.epsilon)
        update = (moment.flat / (1 - at.momentum**steps)).div_(divisor).masked_fill_(divisor == 0, 0)
        staged: AggregationResult = yield from self.inner.aggregate(
            FlatTensors(update.to(x.flat.dtype), x.layout), state.part("", MOMENTUM).part("", VARIANCE), at, out
        )
        return replace(staged, next_state=State({MOMENTUM: moment, VARIANCE: variance, **staged.next_state}))
