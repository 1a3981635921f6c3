"""Aggregation records: what a compressor is given (state, context) and what it returns (result)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.base.layout import FlatTensors
from gossamer.base.ops import CollectiveOp

FORM = "form"  # the key of what a message looks like at this step, the same on every rank

STEADY = 2**40  # the number of a step after any warm-up, as most steps of a training are


class State(dict[str, FlatTensors]):
    """A compressor's memory between steps, and scratch memory for its memory after the next step.

    Nothing is overwritten before a step is committed. So two buffers of a kind take turns: `scratch` gives the one of
    the step before, whose contents are not needed any more.
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

    def part(self, prefix: str, *without: str) -> State:
        """The entries that begin with `prefix`, under the rest of their names, except `without`."""
        found = State(
            {key.removeprefix(prefix): self[key] for key in self if key.startswith(prefix) and key not in without}
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


class Moments(NamedTuple):
    """An optimizer's settings, for compressors that apply its momentum in its place."""

    momentum: float = 0.0  # Adam's first beta
    nesterov: bool = False
    second_beta: float = 0.0
    epsilon: float = 1e-8


NO_MOMENTS = Moments()


@dataclass(frozen=True, kw_only=True)
class AggregationContext:
    """Step, rank and settings of an aggregation. Random numbers are addressed by it; hyperparameters are the group's.

    A rank that has run out of data may give an old momentum, so no state that all ranks have alike may follow from it.
    """

    step: int = 0
    seed: int = 0
    rank: int = 0
    world: int = 1
    momentum: float = 0.0  # the optimizer's now (Adam's first beta), for compressors that apply it in its place
    nesterov: bool = False  # likewise
    second_beta: float = 0.0  # likewise, of Adam
    epsilon: float = 1e-8  # likewise, of Adam


@dataclass(frozen=True, kw_only=True)
class AggregationResult:
    """What an aggregation returns; nothing is committed until the whole step is.

    LAW: mean over workers of own = mean + sum over workers of (owed' - owed).
    """

    #: The result of the group, the same bits on every rank.
    mean: Tensor
    #: Computes the part of the mean that this worker contributed, in full size; called only where it is needed.
    own_contribution: Callable[[], Tensor]
    #: Computes this worker's share of the rounding debt: what rounding after the exchange has not given back yet, in
    #: units of the mean; the shares of all workers add up. None: no debt.
    owes: Callable[[], Tensor] | None = None
    #: The state to commit.
    next_state: State = field(default_factory=State)
    #: False where the mean holds a non-finite number, for instance because one left a format's range; the same on every
    #: rank, and the step must then be skipped.
    finite: bool = True

    @property
    def own(self) -> Tensor:
        """This worker's contribution. Ask before the input, or the state it came from, is written again."""
        return self.own_contribution()

    @property
    def owed(self) -> Tensor | None:
        """This worker's share of the rounding debt; None: no debt. To be asked as early as `own`."""
        return None if self.owes is None else self.owes()


Aggregation = Generator[CollectiveOp, Any, AggregationResult]
