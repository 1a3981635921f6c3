"""Straggler rule: names the rank that all others wait for, and why it takes longer than they do.

In lock step every rank's steps take equally long, and only what they consist of differs: who works longest waits least.
So a straggler is told by its own work, not by its step time.

    rank 0   work ####          waiting ######          rank 2 is named: its work is longer than the others' by what
    rank 1   work #####         waiting #####           they wait, and most of the difference is data loading
    rank 2   data ###### work ####
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Cause = Literal["computing", "data loading", "garbage collection", "loaded machine", "link", "stopped"]

NOTEWORTHY = 0.2  # of a step: less is noise between equal machines
EXPLAINED = 0.5  # of the excess, that others must wait, or a counter must show
SLOWER_LINK = 0.6  # of the median rate between the other ranks
MUCH_WAITING = 0.3  # of a step: below it a slow link costs nobody anything
SILENT_STEPS, SILENT_SECONDS = 5.0, 5.0  # vitals come every two seconds


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """What one rank's steps consist of, on average over the same few steps of all ranks: seconds of one step."""

    rank: int
    step: int  # the last of them
    seconds: float
    waiting: float  # of the training thread, for others or for the wire
    data: float = 0.0  # between a step's end and the next forward pass
    garbage: float = 0.0  # in the garbage collector
    denied: float = 0.0  # share of time in which its control group's quota was used up
    crowded: float = 0.0  # share of time that its training thread was ready and had no core
    silent_seconds: float = 0.0  # since its process was last heard
    rates: Mapping[int, float] | None = None  # bytes a second of its connections, by peer

    @property
    def work(self) -> float:
        return self.seconds - self.waiting


@dataclass(frozen=True)
class Straggler:
    """The rank that others wait for, with one sentence of evidence."""

    rank: int
    step: int
    cause: Cause
    evidence: str


def straggler(paces: Sequence[RankPace], noteworthy: float = NOTEWORTHY) -> Straggler | None:
    """Who holds up the others; None where nobody does, or there is nobody to compare it with.

    noteworthy: how much longer its work must be, of a step
    law:    at most one is named, and nobody whose work is within that of the others' median
    """
    if len(paces) < 2:
        return None
    return _stopped(paces) or _slow(paces, noteworthy) or _behind_a_slow_link(paces)


def _stopped(paces: Sequence[RankPace]) -> Straggler | None:
    last = max(paces, key=lambda pace: pace.silent_seconds)
    others = [pace.silent_seconds for pace in paces if pace is not last]
    patience = max(SILENT_SECONDS, SILENT_STEPS * median(pace.seconds for pace in paces))
    if last.silent_seconds - max(others) < patience:
        return None
    said = f"its process has said nothing for {last.silent_seconds:.1f} s, and all others have"
    return Straggler(last.rank, last.step, "stopped", said)


def _slow(paces: Sequence[RankPace], noteworthy: float) -> Straggler | None:
    slowest = max(paces, key=lambda pace: pace.work)
    others = [pace for pace in paces if pace is not slowest]
    excess = slowest.work - median(pace.work for pace in others)
    waited = median(pace.waiting for pace in others) - slowest.waiting
    if excess < noteworthy * median(pace.seconds for pace in paces) or waited < EXPLAINED * excess:
        return None
    cause, evidence = _why(slowest, others, excess)
    return Straggler(slowest.rank, slowest.step, cause, evidence)


def _why(slowest: RankPace, others: Sequence[RankPace], excess: float) -> tuple[Cause, str]:
    data = slowest.data - median(pace.data for pace in others)
    garbage = slowest.garbage - median(pace.garbage for pace in others)
    longer = f"its own work takes {_ms(excess)} a step longer than the others'"
    if garbage >= EXPLAINED * excess:
        return "garbage collection", f"{longer}, and {_ms(garbage)} of it is Python's garbage collector"
    if data >= EXPLAINED * excess:
        said = f"{longer}: {_ms(slowest.data)} a step pass before its next batch is there"
        return "data loading", said
    denied = slowest.denied - median(pace.denied for pace in others)
    crowded = slowest.crowded - median(pace.crowded for pace in others)
    if crowded * slowest.seconds >= EXPLAINED * excess and crowded > denied:
        said = f"{longer}: for {slowest.crowded:.0%} of the time its thread was ready and no core was free"
        return "loaded machine", said
    if denied > NOTEWORTHY * EXPLAINED:
        return "computing", f"{longer}: for {slowest.denied:.0%} of the time its quota of processor time was used up"
    return "computing", f"{longer}, with a core of its own"


def _behind_a_slow_link(paces: Sequence[RankPace]) -> Straggler | None:
    known = [pace for pace in paces if pace.rates]
    if len(known) < 3 or median(pace.waiting / pace.seconds for pace in paces if pace.seconds) < MUCH_WAITING:
        return None
    # What two ranks reach between them says nothing of which end is slow, and one of several connections may be slow by
    # chance, as where packets are lost: who is slow towards everybody, in both directions, is
    fastest = {pace.rank: max(own) for pace in known if len(own := _towards(pace.rank, known)) >= len(known) - 1}
    if not fastest:
        return None
    slowest = min((pace for pace in known if pace.rank in fastest), key=lambda pace: fastest[pace.rank])
    between = [
        rate for pace in known for peer, rate in (pace.rates or {}).items() if slowest.rank not in (pace.rank, peer)
    ]
    if not between or fastest[slowest.rank] > SLOWER_LINK * median(between):
        return None
    said = (
        f"its connections reach {_mbit(fastest[slowest.rank])} at most, those between the others "
        f"{_mbit(median(between))}, and all wait for the wire "
        f"{median(pace.waiting / pace.seconds for pace in paces):.0%} of the time"
    )
    return Straggler(slowest.rank, slowest.step, "link", said)


def _towards(rank: int, paces: Sequence[RankPace]) -> list[float]:
    """Rates of a rank's connections, in both directions."""
    mine = [rate for pace in paces if pace.rank == rank for rate in (pace.rates or {}).values()]
    return mine + [pace.rates[rank] for pace in paces if pace.rates and rank in pace.rates]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _mbit(bytes_per_second: float) -> str:
    return f"{8e-6 * bytes_per_second:.3g} Mbit/s"
