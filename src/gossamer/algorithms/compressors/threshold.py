"""Threshold sparsification: the entries above a fixed magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Codec
from gossamer.algorithms.compressors.decoding import expect_tensors
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.topk import dearer_than_dense, entries_bytes, expect_values, require_places, share
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.kernels import Residual, above, decode_places, encode_places, expect_summable, scatter
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError, require


@dataclass(frozen=True, repr=False)
class Threshold(Codec):
    """Send the entries whose magnitude exceeds `value`, at most the `capacity` N largest of all tensors together.

    C(x)_j = x_j if |x_j| > value and among the r = capacity N largest, else 0
    law:    |x_j - C(x)_j| <= value unless more than r entries exceed it
    bytes:  (workers - 1) (4 + r itemsize + coded_bytes(r, N)), also if fewer exceed it; never more than Dense
    source: Strom 2015, Interspeech; Dryden et al. 2016, MLHPC

    Strom calls `value` the threshold tau. All payloads have the same size: room for r entries, and the number of
    entries used. Further entries remain in the residual. If the payload would cost as much as an all-reduce, the
    compressor all-reduces everything instead, without error.

    Args:
        value: magnitude that an entry must exceed, 0 or more, in units of the gradient.
        capacity: fraction of entries that a payload has room for, in (0, 1].
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.Threshold(value=0.01, capacity=0.02)
        Threshold(value=0.01, capacity=0.02)
    """

    value: float
    capacity: float = 0.05
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.value >= 0,
            f"value must be a magnitude that entries exceed, 0 or more, got {self.value}. Write Threshold(value=0.01).",
        )
        require(
            0 < self.capacity <= 1,
            f"capacity must be the fraction of entries that a payload has room for, in (0, 1], got {self.capacity}. "
            "Write Threshold(value=0.01, capacity=0.05) for at most 5 %.",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def slots(self, numel: int) -> int:
        """Return the most entries of `numel` that a payload has room for."""
        return share(self.capacity, numel)

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        require_places(x.layout)
        room = self.slots(x.layout.numel)
        places, values = above(x.flat, self.value, room, residual)
        used = torch.tensor([len(places)], dtype=torch.int32, device=x.flat.device)
        return used, values, encode_places(places, x.layout.numel, room)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        expect_tensors(payloads, 3)
        room = self.slots(layout.numel)
        scatter([self._used(payload, room, out, len(payloads)) for payload in payloads], out, divisor)

    def _used(self, payload: Payload, room: int, out: Tensor, payloads: int) -> tuple[Tensor, Tensor]:
        """Return (indices, values) of the entries of a payload. Raises MalformedError."""
        used, values, coded = payload
        expect_values(values, room, out)
        expect_summable(values, payloads)
        if used.dtype != torch.int32 or used.shape != (1,):
            raise MalformedError(f"expected one int32, the number of entries, got {tuple(used.shape)} in {used.dtype}")
        count = room if used.is_meta else int(used)
        return decode_places(coded, count, len(out), room), values[:count]

    @property
    def widens_residuals(self) -> bool:
        return False  # it may send an uncompressed mean

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if self._dearer_than_dense(x, at):
            return Dense().aggregate(x, state, at, out)
        return super().aggregate(x, state, at, out)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        if self._dearer_than_dense(x, at):
            return Dense().aggregate_compensated(x, residual, State(), at, out)
        return super().aggregate_compensated(x, residual, state, at, out)

    def _dearer_than_dense(self, x: FlatTensors, at: AggregationContext) -> bool:
        return dearer_than_dense(4 + entries_bytes(self.slots(x.layout.numel), x), x, at)
