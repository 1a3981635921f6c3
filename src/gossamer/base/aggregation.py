"""Aggregation records: the inputs of a compressor (state, context) and its output (result)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.base.layout import FlatTensors
from gossamer.base.ops import CollectiveOp

FORM = "form"  # key of the state that determines a message's format at this step, the same on every rank

STEADY = 2**40  # a step number after any warm-up, representative of most steps


class State(dict[str, FlatTensors]):
    """A compressor's state between steps, and scratch memory for the next state.

    Nothing is overwritten before a step is committed, so the state is double-buffered: `scratch` returns the buffer of
    the previous step.

    Args:
        items: flat buffers by key.

    Example:
        >>> state = gossamer.extend.State({"residual": gossamer.extend.FlatTensors.pack({"weight": torch.ones(3)})})
    """

    _buffers: dict[str, FlatTensors] | None = None  # of the next state, made when first needed
    _prefix = ""  # of keys in them

    @property
    def _scratch(self) -> dict[str, FlatTensors]:
        if self._buffers is None:
            self._buffers = {}
        return self._buffers

    def scratch(self, key: str) -> FlatTensors:
        """Return memory like self[key] with arbitrary contents; the same at every call until a step is committed."""
        now, place, buffers = self[key], self._prefix + key, self._scratch
        if place not in buffers or buffers[place].layout != now.layout:
            buffers[place] = FlatTensors(torch.empty_like(now.flat), now.layout)
        return buffers[place]

    def part(self, prefix: str, *without: str) -> State:
        """Return the entries whose keys start with `prefix`, without the prefix, except `without`."""
        found = State(
            {key.removeprefix(prefix): self[key] for key in self if key.startswith(prefix) and key not in without}
        )
        found._buffers, found._prefix = self._scratch, self._prefix + prefix
        return found

    def after(self, before: State) -> State:
        """Commit this state after `before`, and reuse the memory of `before` as scratch."""
        self._buffers = {
            key: packed
            for key, packed in before.items()
            if key in self and self[key].flat.data_ptr() != packed.flat.data_ptr()
        }
        return self


class Moments(NamedTuple):
    """An optimizer's settings, for compressors that apply its momentum."""

    momentum: float = 0.0  # Adam's first beta
    nesterov: bool = False
    second_beta: float = 0.0
    epsilon: float = 1e-8


NO_MOMENTS = Moments()


@dataclass(frozen=True, kw_only=True)
class AggregationContext:
    """Step, rank and settings of an aggregation. Random numbers are derived from it.

    A rank that has run out of data may pass an outdated momentum, so state that is equal on all ranks must not depend
    on it.

    Args:
        step: number of the step, from 0.
        seed: equal on all ranks.
        rank: this worker's rank in the group.
        world: size of the group.
        momentum: the optimizer's current momentum (Adam's first beta), for compressors that apply it.
        nesterov: whether that momentum is Nesterov's.
        second_beta: Adam's second beta.
        epsilon: Adam's epsilon.

    Example:
        >>> at = gossamer.extend.AggregationContext(step=10, rank=1, world=4)
    """

    step: int = 0
    seed: int = 0
    rank: int = 0
    world: int = 1
    momentum: float = 0.0
    nesterov: bool = False
    second_beta: float = 0.0
    epsilon: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class AggregationResult:
    """The result of an aggregation; it is committed with the whole step.

    LAW: mean over workers of `own` = mean + sum over workers of the change of `owed`.

    Attributes:
        mean: (n,), the result of the group, with the same bits on every rank.
        own_contribution: computes this worker's contribution to the mean, (n,); called only if needed.
        `owes`: computes this worker's share of the group's residual, (n,), in units of the mean; None: no residual.
        next_state: the state to commit.
        finite: False on every rank if the mean is not finite; the step must then be skipped.
    """

    mean: Tensor
    own_contribution: Callable[[], Tensor]
    owes: Callable[[], Tensor] | None = None
    next_state: State = field(default_factory=State)
    finite: bool = True

    @property
    def own(self) -> Tensor:
        """This worker's contribution. Read it before the input, or the state it was computed from, is modified."""
        return self.own_contribution()

    @property
    def owed(self) -> Tensor | None:
        """This worker's share of the group's residual; None without one. Read it as early as `own`."""
        return None if self.owes is None else self.owes()


Aggregation = Generator[CollectiveOp, Any, AggregationResult]
