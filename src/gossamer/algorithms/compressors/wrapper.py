"""Base of compressors that wrap another compressor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gossamer.algorithms.compressors.base import Compressor
from gossamer.base.aggregation import Aggregation, State
from gossamer.base.layout import Slot


class Wrapper(Compressor):
    """A compressor around `inner` that receives the same tensors; grouping and suitable shapes are those of `inner`."""

    inner: Compressor

    def group(self, slot: Slot) -> int:
        return self.inner.group(slot)

    def suits(self, shape: Sequence[int]) -> bool:
        return self.inner.suits(shape)


def without_state(state: State, aggregation: Aggregation) -> Aggregation:
    """Return an aggregation without state, after which `state` is unchanged."""
    staged = yield from aggregation
    return replace(staged, next_state=State(state))
