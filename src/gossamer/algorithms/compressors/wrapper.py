"""Base of compressors that stand around another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gossamer.algorithms.compressors.base import Compressor
from gossamer.base.aggregation import Aggregation, State
from gossamer.base.layout import Slot


class Wrapper(Compressor):
    """A compressor around `inner`, which sees the tensors as they come: they are grouped, and suit, as it says."""

    inner: Compressor

    def group(self, slot: Slot) -> int:
        return self.inner.group(slot)

    def suits(self, shape: Sequence[int]) -> bool:
        return self.inner.suits(shape)


def beside(state: State, aggregation: Aggregation) -> Aggregation:
    """An aggregation that remembers nothing, in a step after which `state` is as it was."""
    staged = yield from aggregation
    return replace(staged, next_state=State(state))
