"""Error feedback: keeps what a compressor did not send and adds it to the next input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.compressors.base import Compressor, Decoder
from gossamer.compressors.wrapper import Wrapper
from gossamer.core.aggregation import Aggregation, AggregationContext, State
from gossamer.core.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.kernels import Residual

RESIDUAL = "residual"


@dataclass(frozen=True, repr=False)
class Feedback(Wrapper):
    """Remember what the inner compressor lost and offer it again next time.

    wanted = x + residual, residual' = wanted - own
    law:    sum of what was sent + mean residual = sum of what was given
    bytes:  the inner compressor's; memory: 2 N of at least float32, which take turns
    source: Seide et al. 2014, Interspeech; Karimireddy et al. 2019, ICML

    The residual is local and in gradient units: a learning rate that falls also shrinks what is still owed.
    """

    inner: Compressor

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        return self.inner.decoders(layout)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        residual = torch.zeros_like(like.flat, dtype=accumulation_dtype(like.flat.dtype))
        return State({RESIDUAL: FlatTensors(residual, like.layout), **self.inner.init_compensated(like, at)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        left = state.scratch(RESIDUAL)
        residual = Residual(state[RESIDUAL].flat, left.flat)
        staged = yield from self.inner.aggregate_compensated(x, residual, state.part("", RESIDUAL), at, out)
        return replace(staged, next_state=State({RESIDUAL: left, **staged.next_state}))
