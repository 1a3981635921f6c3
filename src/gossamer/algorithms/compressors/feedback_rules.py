"""Feedback rules: what a worker remembers of what it sent, and what it therefore sends next."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, mean_buffer_like, with_mean_in
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, all_finite, scratch_like
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype

RESIDUAL = "residual"  # what this worker did not send yet
KNOWN = "known"  # what the others know of this worker's numbers: the sum of all that it sent
KNOWN_MEAN = "known_mean"  # the mean of that over the workers, the last answer: the same bits on every rank
SMOOTHED = "smoothed"  # the moving average of this worker's numbers
BEGUN = "begun"  # per tensor: 1 where its moving average holds anything, else 0


class FeedbackRule(Protocol):
    """Memory around an inner compressor."""

    @property
    def incremental(self) -> bool:
        """Whether a message is a change to those before it, and means nothing without them."""

    def init(self, inner: Compressor, like: FlatTensors, at: AggregationContext) -> State: ...

    def aggregate(
        self, inner: Compressor, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation: ...


@dataclass(frozen=True)
class Losses:
    """Add what was lost to the next numbers. decay: the share of what was lost before that is added."""

    decay: float = 1.0

    incremental = False

    def init(self, inner: Compressor, like: FlatTensors, at: AggregationContext) -> State:
        return State({RESIDUAL: _zeros(like.layout, like), **inner.init_compensated(like, at)})

    def aggregate(
        self, inner: Compressor, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation:
        left = state.scratch(RESIDUAL)
        before = state[RESIDUAL].flat
        if self.decay != 1:
            before = torch.mul(before, self.decay, out=left.flat)
        residual = Residual(before, left.flat)
        staged = yield from inner.aggregate_compensated(x, residual, state.part("", RESIDUAL), at, out)
        return replace(staged, next_state=State({RESIDUAL: left, **staged.next_state}))


@dataclass(frozen=True)
class Differences:
    """The difference to what the others know travels; momentum: the newest numbers' share of what is told."""

    momentum: float

    incremental = True

    def init(self, inner: Compressor, like: FlatTensors, at: AggregationContext) -> State:
        kept = {KNOWN: _zeros(like.layout, like), KNOWN_MEAN: _zeros(like.layout, like)}
        if self.momentum < 1:
            flags = Layout.of(dict.fromkeys(like.layout.names, (1,)))
            kept |= {SMOOTHED: _zeros(like.layout, like), BEGUN: _zeros(flags, like)}
        return State({**kept, **inner.init_compensated(like, at)})

    def aggregate(
        self, inner: Compressor, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation:
        """The inner compressor compensates for what is known, with a minus before it: it sends the difference, by the
        very encoder that it has within feedback."""
        smoothed = self._smoothed(x, state)
        told = smoothed.get(SMOOTHED, x).flat.to(state[KNOWN].flat.dtype)
        known, mean = state.scratch(KNOWN), state.scratch(KNOWN_MEAN)
        room = torch.neg(state[KNOWN].flat, out=scratch_like(known.flat))
        staged: AggregationResult = yield from inner.aggregate_compensated(
            FlatTensors(told, x.layout),
            Residual(room, room),
            state.part("", KNOWN, KNOWN_MEAN, SMOOTHED, BEGUN),
            at,
            mean.flat,
        )
        torch.add(state[KNOWN].flat, staged.own, out=known.flat)  # entries that did not travel keep their bits
        mean.flat.add_(state[KNOWN_MEAN].flat)

        def own() -> Tensor:
            """What is known, less what of it the group has not given back yet: so it averages to the answer."""
            debt = staged.owed
            return known.flat.clone() if debt is None else torch.sub(known.flat, debt, alpha=at.world)

        answer = AggregationResult(
            mean=mean_buffer_like(x.flat, out).copy_(mean.flat),
            own_contribution=own,
            next_state=State({**smoothed, KNOWN: known, KNOWN_MEAN: mean, **staged.next_state}),
            finite=staged.finite and all_finite(mean.flat),
        )
        return with_mean_in(answer, out)

    def _smoothed(self, x: FlatTensors, state: State) -> State:
        """The moving averages with x in them. A tensor's first numbers are its first average, not a part of it."""
        if self.momentum == 1:
            return State()
        before, after, begun = state[SMOOTHED].flat, state.scratch(SMOOTHED), state.scratch(BEGUN)
        shares = torch.full_like(state[BEGUN].flat, self.momentum).masked_fill_(state[BEGUN].flat == 0, 1)
        sizes = torch.tensor(x.layout.sizes, device=before.device)
        each = shares.repeat_interleave(sizes, output_size=x.layout.numel)
        torch.lerp(before, x.flat.to(before.dtype), each, out=after.flat)
        begun.flat.fill_(1)
        return State({SMOOTHED: after, BEGUN: begun})


def debtor(prefix: str, memory: Container[str]) -> tuple[str, int]:
    """(key, sign) of what takes up what the group owes itself: a residual as more to send, and what is known as less
    that was sent."""
    return (prefix + KNOWN, -1) if prefix + KNOWN in memory else (prefix + RESIDUAL, 1)


def begins_from(key: str) -> str:
    """The key of what the same memory of a new worker begins from: it has sent nothing, and the answer goes on only if
    it is taken to have sent just that."""
    prefix, dot, last = key.rpartition(".")
    return prefix + dot + KNOWN_MEAN if last == KNOWN else key


def _zeros(layout: Layout, like: FlatTensors) -> FlatTensors:
    return FlatTensors.zeros(layout, dtype=accumulation_dtype(like.flat.dtype), device=like.flat.device)
