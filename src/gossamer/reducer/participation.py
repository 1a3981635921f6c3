"""Participation poll before each sync round: all-gathers (sample weight, backward passes, presence)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gossamer.core.ops import AllGather
from gossamer.errors import LoopError
from gossamer.reducer.step_report import Presence, StepDecision
from gossamer.runtime.comm_thread import CommThread
from gossamer.runtime.runner import ScriptCost, run_script
from gossamer.runtime.transport import Transport


@dataclass(frozen=True)
class Participants:
    """Who came to a turn, by rank: with what weight, after how many backward passes, and why."""

    weights: tuple[float, ...]
    passes: tuple[int, ...]
    presences: tuple[Presence, ...]

    @property
    def weight(self) -> float:
        return sum(self.weights)

    @property
    def active(self) -> bool:
        """Whether anybody goes on training."""
        return Presence.TRAINING in self.presences

    @property
    def together(self) -> bool:
        """Whether all have made equally many backward passes."""
        return len(set(self.passes)) == 1

    def present(self, presence: Presence) -> tuple[int, ...]:
        return tuple(rank for rank, theirs in enumerate(self.presences) if theirs == presence)


POLL_BYTES = 24


def gather_participants(weight: float, passes: int, presence: Presence) -> Generator[AllGather, Any, Participants]:
    """The first word of a turn in which parameters are averaged."""
    heard = yield AllGather((torch.tensor([weight, passes, presence], dtype=torch.float64, device="cpu"),))
    weights, clocks, presences = zip(*(theirs.tolist() for (theirs,) in heard), strict=True)
    return Participants(tuple(weights), tuple(map(int, clocks)), tuple(map(Presence, presences)))


def refuse_to_save_apart(met: Participants | StepDecision) -> None:
    """A checkpoint needs all ranks at the same step."""
    saving, everyone = met.present(Presence.SAVING), sum(len(met.present(presence)) for presence in Presence)
    if saving and len(saving) < everyone:
        who = f"rank{'s' * (len(saving) > 1)} {', '.join(map(str, saving))}"
        raise LoopError(
            f"call session.save() on every rank, not only where world.is_first: {who} called it while others went on "
            "training or had run out of data, and a checkpoint needs all of them at the same step. Where ranks have "
            "different numbers of batches, write `with session.epoch():` around the loop over batches and save after "
            "it, or let all draw equally many: DataLoader(..., drop_last=True)."
        )


class ParticipationPoll:
    """Asks on the lane that carries the turns, or `apart` from it, over a group and a lane of its own.

    Apart, the question of a turn does not wait for the turns before it; every rank asks in the same order either way.
    """

    def __init__(self, transport: Transport, comm_thread: CommThread, *, apart: bool) -> None:
        self._comm_thread = comm_thread.beside() if apart else comm_thread
        self._transport = transport.part(transport.world) if apart else transport
        self._apart = apart

    def ask(self, weight: float, passes: int, presence: Presence) -> Callable[[], ScriptCost]:
        """What waits for the answer on the turns' lane, which is a Meeting. Raises LoopError there."""
        if not self._apart:
            return partial(self._meet, weight, passes, presence)
        return self._comm_thread.submit(partial(self._meet, weight, passes, presence)).wait

    def hear(self, weight: float, passes: int, presence: Presence) -> ScriptCost:
        """Ask, and wait for the answer in this thread."""
        return self._comm_thread.submit(partial(self._meet, weight, passes, presence)).wait()

    def _meet(self, weight: float, passes: int, presence: Presence) -> ScriptCost:
        met = run_script(gather_participants(weight, passes, presence), self._transport)
        refuse_to_save_apart(met.result)
        return met

    def close(self) -> None:
        if self._apart:
            self._comm_thread.close()
