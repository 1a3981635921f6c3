"""Traces of runs that never were: ranks with clocks of their own, on a network with a known way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gossamer.base.spans.record_format import EVERYONE, SpanKind, code_of
from gossamer.base.spans.recorder import SpanRecorder
from gossamer.base.spans.step_range import StepRange

OWN_SECONDS = 1e-4  # after which a rank has its own part
GATHER = code_of({"Gather"})


@dataclass(frozen=True)
class SkewedClock:
    """Shows ahead + (1 + drift) t at the true time t."""

    ahead: float = 0.0
    drift: float = 0.0

    def __call__(self, true: float) -> float:
        return self.ahead + (1 + self.drift) * true


@dataclass
class FakeGroup:
    rank: int
    world: int

    __hash__ = object.__hash__


CLOCKS = (SkewedClock(), SkewedClock(1234.5, 80e-6), SkewedClock(-77.7, -120e-6), SkewedClock(5e4, 30e-6))


@dataclass
class ElasticGroup(FakeGroup):
    """Says the number of its next operation, as a group whose members change does."""

    operation_number: int = 0

    __hash__ = object.__hash__


@dataclass
class RelayedGroup(FakeGroup):
    """Has ranks that relays connect to this one, as an elastic run does."""

    detours: Mapping[int, int | None] = field(default_factory=dict)

    __hash__ = object.__hash__


LEFT, JOINED, LAST = 5, 8, 12  # rounds: rank 1's last, its successor's first, and the last of all


def record_changes(folder: Path, clocks: Sequence[SkewedClock], *, numbered: bool = True) -> None:
    """Rounds of an elastic run: rank 1 is killed while it writes, and another one joins later, who is rank 1, too.

    clocks: of rank 0, of the one that leaves, of the one that joins. numbered: whether the group says its numbers.
    """
    members = [(0, range(1, LAST + 1)), (1, range(1, LEFT + 1)), (1, range(JOINED, LAST + 1))]
    for place, ((rank, rounds), clock) in enumerate(zip(members, clocks, strict=True)):
        recorder = SpanRecorder(folder, rank, 2, StepRange(), clock=f"machine {place}")
        group = ElasticGroup(rank, 2) if numbered else FakeGroup(rank, 2)
        for number in rounds:
            if isinstance(group, ElasticGroup):
                group.operation_number = number << 32
            late = 0.05 if number % 2 == bool(rank) else 0.0  # either comes last now and then
            began, ended = clock(number + late), clock(number + 0.07)
            recorder.operation(began, ended, recorder.position(group), GATHER, 40, EVERYONE)
            recorder.add(SpanKind.STEP, clock(number - 0.9), ended, number)
        recorder.close()
        if place == 1:
            recorder.path.write_bytes(recorder.path.read_bytes()[:-7])


@dataclass(frozen=True)
class Rounds:
    """Rounds in which every rank computes, gathers, and goes on when it has heard all."""

    count: int = 120
    compute_seconds: float = 0.2  # and up to as much again
    way_seconds: float = 0.010
    jitter_seconds: float = 0.0005  # on average, in addition
    pause_seconds: float = 0.0  # between two rounds
    machines: Sequence[int] = ()  # by rank; each has its own where that is not said

    def record(self, folder: Path, clocks: Sequence[SkewedClock], seed: int = 0) -> float:
        """Write a file for each clock's rank; returns the true time at the end."""
        random, world, now = Random(seed), len(clocks), [0.0] * len(clocks)
        machines = self.machines or range(world)
        recorders = [
            SpanRecorder(folder, rank, world, StepRange(), clock=f"machine {machines[rank]}") for rank in range(world)
        ]
        groups = [FakeGroup(rank, world) for rank in range(world)]
        for number in range(1, self.count + 1):
            begins = [t + self.compute_seconds * (1 + random.random()) for t in now]
            ends = [max(self._comes(begins, sender, rank, random) for sender in range(world)) for rank in range(world)]
            for rank, (recorder, clock) in enumerate(zip(recorders, clocks, strict=True)):
                began, ended = clock(begins[rank]), clock(ends[rank])
                recorder.add(SpanKind.FORWARD, clock(now[rank]), began)
                recorder.operation(began, ended, recorder.position(groups[rank]), GATHER, 40, EVERYONE)
                recorder.add(SpanKind.WIRE, began, ended)
                recorder.add(SpanKind.STEP, clock(now[rank]), ended, number)
            now = [end + self.pause_seconds for end in ends]
        for recorder in recorders:
            recorder.close()
        return max(now)

    def _comes(self, begins: Sequence[float], sender: int, receiver: int, random: Random) -> float:
        way = self.way_seconds + random.expovariate(1 / self.jitter_seconds)
        return begins[sender] + (OWN_SECONDS if sender == receiver else way)
