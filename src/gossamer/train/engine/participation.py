"""Participation poll before each sync round: all-gathers weights, steps, presences, speeds, moved frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from gossamer.base.ops import AllGather
from gossamer.base.runner import ScriptCost, run_script
from gossamer.base.transport import Transport
from gossamer.base.units import ranks_text
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import LoopError
from gossamer.train.engine.frozen_parameters import FrozenParameters, pack_flags, unpack_flags
from gossamer.train.engine.step_decision import NO_FLAGS, Flags, Presence


class StepPace(NamedTuple):
    """A rank's speed, where local steps follow it."""

    step_seconds: float  # compute time of a local step; 0 if unknown
    steps: float  # local steps since the fragment's last round


@dataclass(frozen=True)
class Participants:
    """Result of a poll, by rank."""

    weights: tuple[float, ...]  # of samples since the last round
    passes: tuple[int, ...]  # optimizer steps so far; with delayed gradients, backward passes
    presences: tuple[Presence, ...]
    members: tuple[int, ...] = ()  # by rank: numbers that do not change with the group
    paces: tuple[StepPace, ...] = ()  # empty unless local steps follow the workers' speeds
    awaited: bool = False  # new workers wait for admission
    moved: Flags = field(default_factory=lambda: NO_FLAGS)  # frozen parameters that a script has changed on any rank

    def among(self, members: Sequence[int]) -> Participants:
        """Those that are in `members`; new workers contribute nothing to a round that was polled before they joined."""
        here = [rank for rank, member in enumerate(self.members) if member in members]
        return Participants(
            tuple(self.weights[rank] for rank in here),
            tuple(self.passes[rank] for rank in here),
            tuple(self.presences[rank] for rank in here),
            tuple(self.members[rank] for rank in here),
            tuple(self.paces[rank] for rank in here if self.paces),
            self.awaited,
            self.moved,
        )

    @property
    def weight(self) -> float:
        return sum(self.weights)

    @property
    def mean_steps(self) -> float:
        """Mean number of local steps since the last round, weighted as their parameters; 0 if unknown."""
        pairs = zip(self.weights, self.paces, strict=False)
        return sum(weight * pace.steps for weight, pace in pairs) / (self.weight or 1.0)

    @property
    def active(self) -> bool:
        """Whether a rank continues training."""
        return Presence.TRAINING in self.presences

    @property
    def together(self) -> bool:
        """Whether all ranks have made the same number of steps."""
        return len(set(self.passes)) == 1


POLL_BYTES = 24
PACE_BYTES = 16


def gather_participants(
    weight: float, passes: int, presence: Presence, moved: Flags = NO_FLAGS, pace: StepPace | None = None
) -> Generator[AllGather, Any, Participants]:
    """The first operation of a round of parameter averaging.

    Args:
        moved: a flag per frozen parameter, equally many on every rank.
        pace: of this rank, if local steps follow the speeds, on every rank.
    """
    local = [weight, passes, presence, *(pace or ()), *pack_flags(moved)]
    gathered = yield AllGather((torch.tensor(local, dtype=torch.float64, device="cpu"),))
    rows = [row.tolist() for (row,) in gathered]
    flags_at = 3 if pace is None else 3 + len(pace)
    union = np.any([unpack_flags(row[flags_at:], len(moved)) for row in rows], axis=0)
    weights, clocks, presences = zip(*(row[:3] for row in rows), strict=True)
    paces = () if pace is None else tuple(StepPace(*row[3:flags_at]) for row in rows)
    return Participants(
        tuple(weights), tuple(map(int, clocks)), tuple(map(Presence, presences)), moved=union, paces=paces
    )


def refuse_apart(presences: Sequence[Presence]) -> None:
    """Raise LoopError unless all ranks make the same call, as checkpoints and the end of a session need."""
    if len({*presences}) == 1:
        return
    ending = [rank for rank, presence in enumerate(presences) if presence == Presence.ENDING]
    if ending and len(ending) < len(presences):
        raise LoopError(
            f"the session of {ranks_text(ending)} ended while others continued "
            "training: it has made fewer steps, because it skipped one or has fewer batches. Make the same number of "
            "steps on every rank, DataLoader(..., drop_last=True), or write `with session.epoch():` around the loop "
            "over batches."
        )
    callers: dict[str, list[int]] = {}
    for rank, presence in enumerate(presences):
        if presence.call is not None:
            callers.setdefault(presence.call, []).append(rank)
    if len(callers) > 1:
        calls = "; ".join(f"{call} on {ranks_text(ranks)}" for call, ranks in callers.items())
        raise LoopError(
            f"the ranks made different calls after the same step: {calls}. Each of these calls needs every rank. Make "
            "the same calls in the same order on every rank."
        )
    for call, ranks in callers.items():
        if len(ranks) < len(presences):
            raise LoopError(
                f"call {call} on every rank, not only where world.is_first: {ranks_text(ranks)} called it while other "
                "ranks continued training or were out of data, but the call needs every rank at the same step. If "
                "ranks have different numbers of batches, write `with session.epoch():` around the loop over batches "
                "and make the call after it, or let all ranks draw the same number: DataLoader(..., drop_last=True)."
            )


class ParticipationPoll:
    """Polls the ranks before each round. Every rank polls in the same order.

    Args:
        apart: use a separate group and thread, so that a poll does not wait for earlier rounds.
        frozen: frozen parameters; before some rounds all ranks compare whether a script has changed them.
    """

    def __init__(
        self, transport: Transport, comm_thread: CommThread, *, apart: bool, frozen: FrozenParameters | None = None
    ) -> None:
        apart = apart and comm_thread.is_fixed  # two groups would have to change together
        self._comm_thread = comm_thread.sibling() if apart else comm_thread
        self._transport = transport.part(transport.world) if apart else transport
        self._apart, self._frozen = apart, frozen
        self._still = NO_FLAGS if frozen is None else frozen.none_moved

    def ask(
        self, weight: float, passes: int, presence: Presence, pace: StepPace | None = None
    ) -> Callable[[], ScriptCost]:
        """Start a poll. The returned function waits for it on the communication thread, and may raise LoopError."""
        meet = partial(self._meet, weight, passes, presence, self._still, pace)
        return self._comm_thread.submit(meet).wait if self._apart else self._comm_thread.as_transaction(meet)

    def looks(self, number: int) -> bool:
        """Whether frozen parameters are compared before round `number`; all ranks must then call `poll`."""
        return self._frozen is not None and self._frozen.looked_at(number)

    def poll(
        self, weight: float, passes: int, presence: Presence, number: int, pace: StepPace | None = None
    ) -> ScriptCost:
        """Poll before round `number`, or in place of it, and wait for the result on this thread. Raises LoopError."""
        if self._frozen is None or not self.looks(number):
            meet = partial(self._meet, weight, passes, presence, self._still, pace)
            return self._comm_thread.exchange(meet).wait()
        meet = partial(self._meet, weight, passes, presence, self._frozen.moved(), pace)
        polled = self._comm_thread.exchange(meet).wait()
        self._frozen.average(polled.result.moved, gives_notice=self._transport.rank == 0)
        return polled

    def _meet(self, weight: float, passes: int, presence: Presence, moved: Flags, pace: StepPace | None) -> ScriptCost:
        met = run_script(gather_participants(weight, passes, presence, moved, pace), self._transport)
        refuse_apart(met.result.presences)
        members = tuple(self._comm_thread.members(self._transport.world))
        return replace(met, result=replace(met.result, members=members, awaited=self._comm_thread.is_awaited))

    def close(self) -> None:
        if self._apart:
            self._comm_thread.close()
