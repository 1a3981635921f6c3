"""Aggregations: what a compressor is given (context, state) and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.core.layout import FlatTensors
from gossamer.core.ops import CollectiveOp


class State(dict[str, FlatTensors]):
    """What a compressor remembers between steps, and scratch memory for what it will remember after the next.

    Nothing is overwritten before a step is committed. So two buffers of a kind take turns: `scratch` gives the one that
    was remembered before, and nobody needs its contents.
    """

    def __init__(self, items: Mapping[str, FlatTensors] | None = None) -> None:
        super().__init__(items or {})
        self._scratch: dict[str, FlatTensors] = {}
        self._prefix = ""

    def scratch(self, key: str) -> FlatTensors:
        """Memory like self[key] with arbitrary contents, the same at every call until a step is committed."""
        now, place = self[key], self._prefix + key
        if place not in self._scratch or self._scratch[place].layout != now.layout:
            self._scratch[place] = FlatTensors(torch.empty_like(now.flat), now.layout)
        return self._scratch[place]

    def part(self, prefix: str, without: str = "") -> State:
        """The entries that begin with `prefix`, under the rest of their names, except `without`."""
        found = State(
            {key.removeprefix(prefix): self[key] for key in self if key.startswith(prefix) and key != without}
        )
        found._scratch, found._prefix = self._scratch, self._prefix + prefix
        return found

    def after(self, before: State) -> State:
        """This state, committed after `before`, whose memory becomes room."""
        self._scratch = {
            key: packed
            for key, packed in before.items()
            if key in self and self[key].flat.data_ptr() != packed.flat.data_ptr()
        }
        return self


@dataclass(frozen=True, kw_only=True)
class AggregationContext:
    """Where an aggregation stands. Randomness is addressed by it, and no hyperparameter differs between ranks.

    momentum, nesterov: the optimizer's at this moment (Adam's first beta), for compressors that apply it in its place.
    A rank that has run out of data may give old ones, so nothing that all ranks remember alike may follow from them.
    """

    step: int = 0
    seed: int = 0
    rank: int = 0
    world: int = 1
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class AggregationResult:
    """What an aggregation returns; nothing is committed until the whole step is.

    mean        what the group agreed on, the same bits on every rank
    mine        computes `own`, this worker's part in it: as large as the input, and not everyone asks for it
    owes        computes `owed`, this worker's share of what the group still owes itself because of rounding after the
                exchange, in units of the mean: the shares of all workers add up; None means nothing
    next_state  the state to commit
    finite      False where the group agreed on a number that is not finite, for instance because one left a format's
                range; the same on every rank, and the step must then be skipped

    LAW: mean over workers of own = mean + sum over workers of (owed' - owed).
    """

    mean: Tensor
    own_contribution: Callable[[], Tensor]
    owes: Callable[[], Tensor] | None = None
    next_state: State = field(default_factory=State)
    finite: bool = True

    @property
    def own(self) -> Tensor:
        """This worker's part in the mean. Ask before the input, or the state it came from, is written again."""
        return self.own_contribution()

    @property
    def owed(self) -> Tensor | None:
        """This worker's share of what is owed; None means nothing. To be asked as early as `own`."""
        return None if self.owes is None else self.owes()


Aggregation = Generator[CollectiveOp, Any, AggregationResult]
