"""Sends Adam's update, which each worker computes from its own gradients."""

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
    """Compute Adam's update from local gradients on each worker, and send it by `inner`.

    m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2, C(m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps)); p -= lr mean
    law:    the inner compressor's, for the update; a recipe wraps it in Feedback if it is biased
    bytes:  the inner compressor's; memory: 4 N of at least float32, double-buffered, plus the inner compressor's
    source: Chen et al. 2021, arXiv 2004.14180; Chen et al. 2022, arXiv 2205.14473

    For torch.optim.AdamW, and Adam without weight decay, with gossamer.attach. betas and eps are read from the
    optimizer at each step; the learning rate and weight decay remain there. A residual is a part of an update, whose
    entries all have a similar magnitude: large and small gradients are equally likely to be sent, and late parts are
    not in the variance. The moments are local to each worker, t counts all steps, and after session.close() the
    optimizer's moments start at zero.

    This differs from Adam of the mean gradient, also with inner=Dense(): v contains the noise of one worker's
    gradients, n times that of their mean, so updates are smaller by up to sqrt(n). Try a learning rate up to sqrt(n)
    times as large. Constant factors of a gradient cancel, so weights of unequal batches have no effect.

    For sparse compressors, start dense: AdamUpdate(Warmup(TopK(density=0.01), steps=500)). With quantizers, entries
    that no batch ever used oscillate by less than a step.

    Args:
        inner: compressor of the update.
        clip: norm limit of each tensor's gradient, clip sqrt(n) per worker; see DGC. None: no clipping.

    Example:
        >>> gossamer.AdamUpdate(gossamer.OneBit())
        AdamUpdate()
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
