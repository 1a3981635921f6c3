"""Deep gradient compression: sparse gradients with momentum correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor
from torch.optim import SGD

from gossamer.algorithms.compressors.base import Codec, Compressor, mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import decode_received, expect_tensors
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
    """Deep gradient compression: accumulate momentum and gradients locally, and send the k = density n largest sums.

    u' = mu u + g, w = v + u' (Nesterov: v + g + mu u'); v' = w and u' stays, but both are 0 where w is sent
    law:    sum of sent values + v = sum over the steps of u' (Nesterov: g + mu u')
    bytes:  (n-1) (k itemsize + coded_bytes(k, N)), N of all tensors together, or 2 (n-1)/n N itemsize where that is
            not more: then everything is sent; memory: 4 N of at least float32, double-buffered
    source: Lin et al. 2018, ICLR

    u is the paper's velocity (momentum correction), v its local gradient accumulation, 1 - density its sparsity. The
    momentum is that of torch.optim.SGD: gossamer.attach takes it over, and after session.close() the optimizer's own
    starts at zero. Weight decay stays with the optimizer.

    masking is the paper's momentum factor masking: sent entries lose their momentum, which would otherwise act on stale
    gradients. With it, density=1 is plain SGD; without, it is momentum SGD. If everything is sent at a lower density,
    only the k largest entries are masked, so momentum lasts as long as if the others had waited.

    clip limits the norm of each tensor's mean gradient. A worker's own g_i may have up to clip sqrt(n): the mean of n
    independent gradients is smaller by sqrt(n), so pure noise is clipped at a mean of norm clip for any n, and equal
    gradients at clip sqrt(n). (The paper's local gradient includes the 1/n of the mean, g_i / n, and its limit is clip
    / sqrt(n): the same.) After backward(), .grad includes momentum and was sent already. Clipping it discards a part of
    the update, and a warning is printed.

    Args:
        density: fraction of entries to send, in (0, 1].
        warmup: steps in which the density falls from 1/4 to `density`.
        masking: whether sent entries lose their momentum.
        clip: norm limit of each tensor's mean gradient; None: no clipping.
        then: codec of the values, such as Int8(), with its payload in place of k itemsize; its error remains in v.
            Whether everything is sent is decided by k itemsize.

    Example:
        >>> gossamer.DGC(density=0.001, warmup=500, clip=1.0)
        DGC(warmup=500, clip=1.0)
    """

    density: float = 0.001
    warmup: int = 0
    masking: bool = True
    clip: float | None = None
    then: Codec | None = None

    def __post_init__(self) -> None:
        require_density(self.density, "DGC")
        require(
            self.warmup >= 0, f"warmup must be a number of steps, 0 or more, got {self.warmup}. Write DGC(warmup=1000)."
        )
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
        """Compute the mean of all ranks' entries; the error of encoding the values remains in `left`."""
        payload = encode_places(places, len(x)), *self._sent_values(values, places, left.flat, at)
        received: Sequence[Payload] = yield AllGather(payload)
        mean = mean_buffer_like(x, out)

        def decode(payloads: Sequence[Payload], into: Tensor, divisor: int = at.world) -> None:
            if not all(payloads):
                raise MalformedError("expected a payload of indices and values, got one without tensors")
            entries = [(self._meant(each[1:], values.layout, into), each[0]) for each in payloads]
            sparse_decode(entries, into, divisor)

        def own() -> Tensor:
            part = torch.empty_like(mean)
            decode([payload], part, 1)
            return part

        finite = decode_received(decode, received, left.layout, mean, at)
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)

    def _sent_values(self, values: FlatTensors, places: Tensor, left: Tensor, at: AggregationContext) -> Payload:
        if self.then is None:
            return (values.flat,)
        lost = torch.zeros_like(values.flat)
        sent_values = self.then.encode(values, at, Residual(lost, lost))
        left.index_copy_(0, places.long(), lost)
        return sent_values

    def _meant(self, payload: Payload, entries: Layout, like: Tensor) -> Tensor:
        if self.then is not None:
            return self.then.decoded(payload, entries, like)
        expect_tensors([payload], 1)
        expect_values(payload[0], entries.numel, like)
        return payload[0]


def require_clip(clip: float | None, noun: str) -> None:
    require(
        clip is None or clip > 0,
        f"clip must be the largest norm of a tensor's mean gradient, above 0, got {clip}. Write {noun}(clip=1.0), or "
        "omit clip.",
    )


def clipped(x: FlatTensors, clip: float | None, at: AggregationContext) -> Tensor:
    """Return x.flat with each tensor scaled down to a norm of at most clip sqrt(n).

    The mean of n independent tensors of that norm has the norm clip. Values that are not finite remain so.
    """
    if clip is None:
        return x.flat
    limit = clip * sqrt(at.world)
    spans = x.flat.split(list(x.layout.sizes))
    norms = [torch.linalg.vector_norm(span, dtype=torch.float64) for span in spans]  # squares overflow in float32
    return torch.cat(
        [span * (limit / norm).clamp(max=1).to(span.dtype) for span, norm in zip(spans, norms, strict=True)]
    )


def _everything(
    places: Tensor, values: Tensor, left: FlatTensors, at: AggregationContext, out: Tensor | None
) -> Aggregation:
    """Compute the mean of `left` with the selected values restored, so that no residual remains."""
    whole = left.flat.index_copy(0, places.long(), values)
    staged = yield from Dense().aggregate(FlatTensors(whole, left.layout), State(), at, mean_buffer_like(whole, out))
    left.flat.zero_()
    return with_mean_in(staged, out)
