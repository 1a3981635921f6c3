"""Link watch: turns the counters of this worker's connections into rows, every few seconds, in the sampler's thread.

A row is {process, round_trip, bytes_per_second, used_bytes, retransmits}: of the connection to that process, as this
end saw it since its row before. bytes_per_second is what the connection carried while it was busy; None where it had
too little to carry, since that pace says nothing of what it could. Where messages are shorter than what the line holds
in a round trip, it is the pace of round trips and not of the line.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import ceil
from typing import Any

from gossamer.events import LinkCounters, LinksOpened

Row = dict[str, Any]
MOST_ROWS = 32  # of one sample: with more peers each has its turn less often


def full_rate(counters: LinkCounters, used_bytes: int, busy_seconds: float) -> float | None:
    """Bytes a second while the connection was busy, over these bytes; None where it was not full.

    It was where the kernel's rate of the latest flight is not for want of data, and no older than these bytes: they are
    more than one flight. That rate itself is of a round trip only, and where packets are lost a matter of chance.
    """
    flight = counters.flight_bytes_per_second * counters.round_trip_seconds
    full = not counters.limited and 0 < flight <= used_bytes and busy_seconds > 0
    return used_bytes / busy_seconds if full else None


class LinkWatch:
    """Samples all groups' connections. Any thread may tell of new ones."""

    def __init__(self) -> None:
        self._opened: list[tuple[LinksOpened, dict[str, LinkCounters]]] = []
        self._lock, self._turn = threading.Lock(), 0

    def opened(self, event: LinksOpened) -> list[Row]:
        """Rows of what was measured as the group began. The bytes that this took are told with the next ones."""
        with self._lock:
            self._opened.append((event, {}))
        return [
            _row(process, event.round_trips[process] or None, rate, 0, 0)
            for process, rate in event.bytes_per_second.items()
        ]

    def sample(self, *, last: bool = False) -> list[Row]:
        """Rows of connections that carried something; of all at once where they are closed, or nothing follows."""
        self._turn += 1
        found: list[Row] = []
        with self._lock:
            watched = list(self._opened)
        for event, before in watched:
            closed = not event.is_open()  # asked first: what is read then are the last numbers
            found += self._rows(event.read(), before, every=1 if closed or last else ceil(len(before) / MOST_ROWS) or 1)
            if closed:
                with self._lock:
                    self._opened = [each for each in self._opened if each[0] is not event]
        return found

    def _rows(self, counted: Mapping[str, LinkCounters], before: dict[str, LinkCounters], every: int) -> list[Row]:
        found = []
        for place, (process, now) in enumerate(counted.items()):
            if (place + self._turn) % every:
                continue
            then = before.get(process)
            used = now.acknowledged_bytes - (then.acknowledged_bytes if then else 0)
            again = now.retransmits - (then.retransmits if then else 0)
            before[process] = now
            if used or again:
                rate = full_rate(now, used, now.busy_seconds - (then.busy_seconds if then else 0.0))
                found.append(_row(process, now.round_trip_seconds, rate, used, again))
        return found


def _row(process: str, round_trip: float | None, rate: float | None, used: int, again: int) -> Row:
    return {
        "process": process,
        "round_trip": None if round_trip is None else round(round_trip, 6),
        "bytes_per_second": None if rate is None else round(rate),
        "used_bytes": used,
        "retransmits": again,
    }
