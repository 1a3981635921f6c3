"""Feedback rules: the state that error feedback keeps, and the input that it gives to the inner compressor."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, mean_buffer_like, with_mean_in
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, all_finite, scratch_like, widened
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype

RESIDUAL = "residual"  # the part of this worker's inputs that was not sent yet
KNOWN = "known"  # the other ranks' estimate of this worker's input: the sum of all that it sent
KNOWN_MEAN = "known_mean"  # its mean over the workers, equal to the last answer: the same bits on every rank
SMOOTHED = "smoothed"  # the moving average of this worker's inputs
BEGUN = "begun"  # per tensor: 1 if its moving average has started, else 0


class FeedbackRule(Protocol):
    """The state around an inner compressor, and its update."""

    @property
    def incremental(self) -> bool:
        """Whether a message is a change relative to earlier messages, and cannot be decoded without them."""

    def init(self, inner: Compressor, like: FlatTensors, at: AggregationContext) -> State: ...

    def aggregate(
        self, inner: Compressor, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation: ...


@dataclass(frozen=True)
class Losses:
    """Classic error feedback: add the residual, times `decay`, to the next input.

    dtype: of the residuals of tensors that are summed in float32; None for float32. It is rounded once per step.
    """

    decay: float = 1.0
    dtype: torch.dtype | None = None

    incremental = False

    def init(self, inner: Compressor, like: FlatTensors, at: AggregationContext) -> State:
        wide = accumulation_dtype(like.flat.dtype)
        dtype = self.dtype if self.dtype is not None and wide == torch.float32 else wide
        zeros = FlatTensors.zeros(like.layout, dtype=dtype, device=like.flat.device)
        kept: Mapping[str, FlatTensors] = inner.init_compensated(like, at)
        if inner.widens_residuals:  # its own state, if any, is the residual of a second encoding
            kept = {key: FlatTensors(each.flat.to(dtype), each.layout) for key, each in kept.items()}
        return State({RESIDUAL: zeros, **kept})

    def aggregate(
        self, inner: Compressor, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation:
        left = state.scratch(RESIDUAL)
        before, after, rest = state[RESIDUAL].flat, left.flat, state.part("", RESIDUAL)
        narrow = before.dtype != accumulation_dtype(x.flat.dtype)
        if narrow and inner.widens_residuals:
            staged = yield from inner.aggregate_compensated(x, Residual(before, after, self.decay), rest, at, out)
        elif narrow:
            with widened(Residual(before, after, self.decay)) as wide:
                assert wide is not None
                staged = yield from inner.aggregate_compensated(x, wide, rest, at, out)
        else:
            if self.decay != 1:
                before = torch.mul(before, self.decay, out=after)
            staged = yield from inner.aggregate_compensated(x, Residual(before, after), rest, at, out)
        return replace(staged, next_state=State({RESIDUAL: left, **staged.next_state}))


@dataclass(frozen=True)
class Differences:
    """EF21: send the difference to the known estimate. momentum: weight of the newest input in its moving average."""

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
        """Run the inner compressor with the negated estimate as residual, so that it encodes the difference.

        It uses the same encoder as classic error feedback.
        """
        smoothed = self._smoothed(x, state)
        smoothed_input = smoothed.get(SMOOTHED, x).flat.to(state[KNOWN].flat.dtype)
        known, mean = state.scratch(KNOWN), state.scratch(KNOWN_MEAN)
        room = torch.neg(state[KNOWN].flat, out=scratch_like(known.flat))
        staged: AggregationResult = yield from inner.aggregate_compensated(
            FlatTensors(smoothed_input, x.layout),
            Residual(room, room),
            state.part("", KNOWN, KNOWN_MEAN, SMOOTHED, BEGUN),
            at,
            mean.flat,
        )
        torch.add(state[KNOWN].flat, staged.own, out=known.flat)  # entries that were not sent keep their bits
        mean.flat.add_(state[KNOWN_MEAN].flat)

        def own() -> Tensor:
            """Return the estimate minus the group's unsettled residual, so that its mean is the answer."""
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
        """Update the moving averages with x. The first input of a tensor initializes its average."""
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
    """Return (key, sign) of the state that absorbs the group's residual: a residual has +1, a known estimate -1."""
    return (prefix + KNOWN, -1) if prefix + KNOWN in memory else (prefix + RESIDUAL, 1)


def begins_from(key: str) -> str:
    """Return the state key from which the same state of a new worker is initialized.

    A new worker has sent nothing. Its known estimate starts at the known mean, so that the incremental answer stays
    valid.
    """
    prefix, dot, last = key.rpartition(".")
    return prefix + dot + KNOWN_MEAN if last == KNOWN else key


def _zeros(layout: Layout, like: FlatTensors) -> FlatTensors:
    return FlatTensors.zeros(layout, dtype=accumulation_dtype(like.flat.dtype), device=like.flat.device)
