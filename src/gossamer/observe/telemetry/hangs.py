"""Hang rule: names the rank that others have waited for too long, and at which operation of which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.observe.telemetry.wait_for_graph import roots

NOTICE_SECONDS = 10.0
FIRST_NOTICE_SECONDS = 60.0  # before any step has ended: compiling and loading take long
USUAL_STEPS = 10.0  # so many steps' time is no hang: validating takes longer than a step
SAVING_NOTICES = 6.0  # so many times longer may a checkpoint take
SILENT_SECONDS = 6.0  # vitals come every two seconds


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """What one rank is at, as it told last. Moments are unix seconds."""

    rank: int
    operation: str = ""  # that is under way, or was the last
    under_way: bool = False
    number: int = -1  # of the operation in its group
    group: tuple[int, int] = (0, 0)  # first rank and size
    step: int = 0
    bucket: int = 0  # from 1; 0: none
    buckets: int = 0
    since: float = 0.0
    waits_for: tuple[int, ...] = ()
    saving: bool = False
    silent_seconds: float = 0.0  # since its process was last heard

    @property
    def is_silent(self) -> bool:
        return self.silent_seconds >= SILENT_SECONDS

    @property
    def place(self) -> str:
        """In words, such as "the all-reduce of step 12, bucket 3 of 7"."""
        of = f" of {self.buckets}" if self.bucket <= self.buckets else ""
        return f"the {self.operation} of step {self.step}" + (f", bucket {self.bucket}{of}" if self.bucket else "")


@dataclass(frozen=True)
class Hang:
    """ranks: who is waited for; in_cycle: by each other alone. evidence: sentences that say so."""

    ranks: tuple[int, ...]
    step: int
    number: int  # of the operation that is waited in
    in_cycle: bool
    evidence: str


def patience(notice_seconds: float, step_seconds: float | None) -> float:
    """How long a wait may last. step_seconds: a usual step's, None before there is any."""
    if step_seconds is None:
        return max(notice_seconds, FIRST_NOTICE_SECONDS)
    return max(notice_seconds, USUAL_STEPS * step_seconds)


def find_hang(activities: Sequence[RankActivity], now: float, patience_seconds: float) -> Hang | None:
    """The hang that the ranks are in, None while they are in none."""
    known = {each.rank: each for each in activities}
    waiting = {
        rank: each
        for rank, each in known.items()
        if each.under_way and not each.is_silent and now - each.since >= patience_seconds
    }
    edges = {rank: whom for rank, each in waiting.items() if (whom := _waits_for(each, known))}
    found = roots(edges)
    if not found.ranks:
        return None
    longest = max((waiting[rank] for rank in edges), key=lambda each: now - each.since)
    of_roots = [known[rank] for rank in found.ranks if rank in known]
    if any(each.saving for each in of_roots) and now - longest.since < SAVING_NOTICES * patience_seconds:
        return None
    first = longest if not found.in_cycle else waiting[found.ranks[0]]
    said = _cycle_text if found.in_cycle else _root_text
    return Hang(found.ranks, first.step, first.number, found.in_cycle, said(found.ranks, edges, known, longest, now))


def _waits_for(waiting: RankActivity, known: Mapping[int, RankActivity]) -> frozenset[int]:
    """Whom its transport says; where it does not, those of its group that have not begun the operation."""
    if waiting.waits_for:
        return frozenset(waiting.waits_for) - {waiting.rank}
    return frozenset(
        rank
        for rank, each in known.items()
        if each.group == waiting.group and each.number < waiting.number and rank != waiting.rank
    )


def _root_text(
    ranks: Sequence[int],
    edges: Mapping[int, frozenset[int]],
    known: Mapping[int, RankActivity],
    longest: RankActivity,
    now: float,
) -> str:
    have = "have" if len(edges) > 1 else "has"
    text = f"{_named(sorted(edges))} {have} waited {now - longest.since:.0f} s for {_named(ranks)} in {longest.place}"
    return "; ".join([text, *(_meanwhile(rank, known.get(rank), now) for rank in ranks[:4])])


def _meanwhile(rank: int, at: RankActivity | None, now: float) -> str:
    if at is None:
        return f"nothing is known here of rank {rank}"
    if at.is_silent:
        return f"rank {rank}'s process has said nothing for {at.silent_seconds:.0f} s: stopped, or its machine is"
    if at.saving:
        return f"rank {rank} saves a checkpoint"
    if at.under_way:
        return f"rank {rank} is in {at.place} itself"
    if not at.operation:
        return f"rank {rank} trains"
    return f"rank {rank} is in no operation: {now - at.since:.0f} s ago it left {at.place}"


def _cycle_text(
    ranks: Sequence[int],
    edges: Mapping[int, frozenset[int]],
    known: Mapping[int, RankActivity],
    longest: RankActivity,
    now: float,
) -> str:
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(known[rank].place, []).append(rank)
    head = f"{_named(ranks)} have waited {now - longest.since:.0f} s for each other"
    if len(places) == 1:
        return f"{head} in {longest.place}: all have begun it, so what they sent does not arrive, or takes as long"
    at = "; ".join(f"{_named(each)} in {place}" for place, each in places.items())
    return f"{head}, in different operations: {at}. Look for what depends on the rank before that"


def _named(ranks: Sequence[int]) -> str:
    *some, last = map(str, ranks)
    return f"ranks {', '.join(some)} and {last}" if some else f"rank {last}"
