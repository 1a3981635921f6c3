"""Deep gradient compression: few entries travel, and those that wait gather momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor
from torch.optim import SGD

from gossamer.algorithms.compressors.base import Codec, Compressor, mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import decode_heard, expect_tensors
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.compressors.topk import (
    chosen,
    dearer_than_dense,
    entries_bytes,
    expect_values,
    require_density,
    require_places,
    shares,
)
from gossamer.algorithms.compressors.warmup import ramp
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, encode_places, largest_with_momentum, sparse_decode
from gossamer.base.layout import FlatTensors, Layout, Slot, accumulation_dtype
from gossamer.base.ops import AllGather, Payload
from gossamer.errors import MalformedError, require

MOMENTUM = "momentum"


@dataclass(frozen=True, repr=False)
class DGC(Compressor):
    """Give gradients momentum on every worker, add up what is not sent, and send the k = density n largest sums.

    u' = mu u + g, w = v + u' (Nesterov: v + g + mu u'); v' = w and u' stays, but both are 0 where w is sent
    law:    sum of what was sent + v = sum of what was offered, which is u' (Nesterov: g + mu u')
    bytes:  (n-1) (k itemsize + coded_bytes(k, N)), N of all tensors together, or 2 (n-1)/n N itemsize where that is
            not more: then everything travels; memory: 4 N of at least float32, which take turns in pairs
    source: Lin et al. 2018, ICLR

    The momentum is that of a torch.optim.SGD: gossamer.attach takes it over, and after session.close() the optimizer's
    own begins at zero. Weight decay stays with the optimizer. masking: what is sent loses its momentum, else it would
    act on long after it became stale; density=1 is then plain SGD, and momentum SGD without. Where everything travels
    at a lower density, only the k largest are masked, so that momentum lasts as long as if the others had waited.
    warmup: steps in which the density falls from a quarter to its own.

    then: a codec that the values travel by, such as Int8(); what it loses waits with the rest.

    clip: the largest norm that the mean of each tensor's fresh gradients should have. A worker's own g_i may have up to
    clip sqrt(n): means of n independent gradients are shorter than these by sqrt(n), so that of noise is clipped where
    the mean would have been, at clip, for any n; that of equal gradients at clip sqrt(n). (The paper's local gradient
    holds the 1/n of the mean already, g_i / n, and its limit is clip / sqrt(n): the same.) What backward() leaves in
    .grad has momentum in it and was sent already: clipping there loses what it cuts off, and a line says so.
    """

    density: float = 0.001
    warmup: int = 0
    masking: bool = True
    clip: float | None = None
    then: Codec | None = None

    def __post_init__(self) -> None:
        require_density(self.density, "DGC")
        require(self.warmup >= 0, f"warmup counts steps, not {self.warmup}. Write DGC(warmup=1000).")
        require_clip(self.clip, "DGC")

    @property
    def must_be_outermost(self) -> bool:
        return True

    @property
    def decodes_without_input(self) -> bool:
        return True

    def owns_momentum(self, slot: Slot) -> Ownership:
        return Ownership(optimizers=(SGD,), rule=UpdateRule.VELOCITY)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        zeros = torch.zeros_like(like.flat, dtype=accumulation_dtype(like.flat.dtype))
        return State({MOMENTUM: FlatTensors(zeros, like.layout), RESIDUAL: FlatTensors(zeros.clone(), like.layout)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        require_places(x.layout)
        momentum, left = state.scratch(MOMENTUM), state.scratch(RESIDUAL)
        counts = shares(ramp(at.step, self.warmup, self.density), x.layout.sizes)
        places, values = largest_with_momentum(
            clipped(x, self.clip, at).to(left.flat.dtype),
            x.layout.sizes,
            counts,
            at.momentum,
            Residual(state[MOMENTUM].flat, momentum.flat),
            Residual(state[RESIDUAL].flat, left.flat),
            nesterov=at.nesterov,
            masked=self.masking,
        )
        if dearer_than_dense(entries_bytes(len(values), x), x, at):
            staged = yield from _everything(places, values, left, at, out)
        else:
            entries = chosen(x.layout.names, counts)
            staged = yield from self._entries(places, FlatTensors(values, entries), x.flat, left, at, out)
        return replace(staged, next_state=State({MOMENTUM: momentum, RESIDUAL: left}))

    def _entries(
        self,
        places: Tensor,
        values: FlatTensors,
        x: Tensor,
        left: FlatTensors,
        at: AggregationContext,
        out: Tensor | None,
    ) -> Aggregation:
        """Agree on the mean of all ranks' entries; what values lose on the way stays in `left`."""
        payload = encode_places(places, len(x)), *self._said(values, places, left.flat, at)
        heard: Sequence[Payload] = yield AllGather(payload)
        mean = mean_buffer_like(x, out)

        def decode(payloads: Sequence[Payload], into: Tensor, divisor: int = at.world) -> None:
            if not all(payloads):
                raise MalformedError("a payload without tensors came, and places and values were due")
            entries = [(self._meant(each[1:], values.layout, into), each[0]) for each in payloads]
            sparse_decode(entries, into, divisor)

        def own() -> Tensor:
            part = torch.empty_like(mean)
            decode([payload], part, 1)
            return part

        finite = decode_heard(decode, heard, left.layout, mean, at)
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)

    def _said(self, values: FlatTensors, places: Tensor, left: Tensor, at: AggregationContext) -> Payload:
        if self.then is None:
            return (values.flat,)
        lost = torch.zeros_like(values.flat)
        said = self.then.encode(values, at, Residual(lost, lost))
        left.index_copy_(0, places.long(), lost)
        return said

    def _meant(self, payload: Payload, entries: Layout, like: Tensor) -> Tensor:
        if self.then is not None:
            return self.then.decoded(payload, entries, like)
        expect_tensors([payload], 1)
        expect_values(payload[0], entries.numel, like)
        return payload[0]


def require_clip(clip: float | None, noun: str) -> None:
    require(
        clip is None or clip > 0,
        f"clip is the largest norm of a tensor's mean gradient, not {clip}. Write {noun}(clip=1.0), or leave it out.",
    )


def clipped(x: FlatTensors, clip: float | None, at: AggregationContext) -> Tensor:
    """x.flat, each tensor scaled down to a norm of at most clip sqrt(n): the mean of n such, if they are independent,
    has the norm clip. What is not finite stays so.
    """
    if clip is None:
        return x.flat
    limit = clip * sqrt(at.world)
    spans = x.flat.split(list(x.layout.sizes))
    norms = [torch.linalg.vector_norm(span, dtype=torch.float64) for span in spans]  # float32's squares overflow early
    return torch.cat(
        [span * (limit / norm).clamp(max=1).to(span.dtype) for span, norm in zip(spans, norms, strict=True)]
    )


def _everything(
    places: Tensor, values: Tensor, left: FlatTensors, at: AggregationContext, out: Tensor | None
) -> Aggregation:
    """Agree on the mean of what is left and the values taken from it together, so that nothing is left."""
    whole = left.flat.index_copy(0, places.long(), values)
    staged = yield from Dense().aggregate(FlatTensors(whole, left.layout), State(), at, mean_buffer_like(whole, out))
    left.flat.zero_()
    return with_mean_in(staged, out)
