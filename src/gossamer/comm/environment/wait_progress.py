"""Wait progress: reports every ten seconds which ranks a worker is waiting for, and when they have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gossamer import events
from gossamer.comm.environment.wait_timeout import duration, waiting_for

NOTICE_SECONDS = 10.0


@dataclass(frozen=True)
class Missing:
    """The awaited ranks, as `ranks 1 and 2 of 3`. why: cause and remedy, reported once."""

    who: str
    why: str = ""


class WaitProgress:
    """One wait of this rank at `place`, for at most `seconds`. A short wait is not reported."""

    def __init__(self, rank: int, place: str, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rank, self.place, self.seconds, self._clock = rank, place, seconds, clock
        self._since = clock()
        self._notice_at = self._since + NOTICE_SECONDS
        self._shown: set[str] = set()
        self._warned = False

    @property
    def waited_seconds(self) -> float:
        return self._clock() - self._since

    @property
    def over(self) -> bool:
        """Whether the timeout has expired."""
        return self.waited_seconds >= self.seconds

    def look(self, missing: Callable[[], Missing | None]) -> None:
        """Report the awaited ranks, if it is time to. missing: returns None if another rank reports them."""
        now = self._clock()
        if now < self._notice_at:
            return
        self._notice_at += NOTICE_SECONDS * (1 + (now - self._notice_at) // NOTICE_SECONDS)
        found = missing()
        if found is None:
            return
        self._warned = True
        why = f" {found.why}" if found.why and found.why not in self._shown else ""
        self._shown.add(found.why)
        waited = duration(round(now - self._since))
        events.notice(
            f"rank {self.rank} has waited {waited} for {found.who} to reach {self.place}, and waits "
            f"{waiting_for(self.seconds)}.{why}"
        )

    def end(self) -> None:
        """Report that all ranks have arrived, if the wait was reported."""
        if self._warned:
            events.notice(
                f"rank {self.rank} continues: all reached {self.place} after {duration(round(self.waited_seconds))}"
            )
        self._warned = False


def named_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks: `rank 3`, `ranks 1 and 2`, `ranks 1 to 6, 9 and 12`."""
    listed = [f"{first} to {last}" if last > first else f"{first}" for first, last in _runs(ranks)]
    if len(listed) > 1:
        listed = [f"{', '.join(listed[:-1])} and {listed[-1]}"]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed[0]}"


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) for each run of three or more; other ranks singly, as (rank, rank)."""
    start = 0
    for end in range(1, len(ranks) + 1):
        if end < len(ranks) and ranks[end] == ranks[end - 1] + 1:
            continue
        run = ranks[start:end]
        yield from [(run[0], run[-1])] if len(run) > 2 else [(each, each) for each in run]
        start = end
