"""Rank activity: what a rank is at, looked at every few seconds, and told once it lasts from one look to the next."""

from __future__ import annotations

import time
from collections.abc import Callable

from gossamer.base.flight_recorder import NOTHING, FlightRecorder, NotedOperation
from gossamer.observe.event_log import Entry


class ActivityWatch:
    """Looks at a flight recorder. clock: its seconds, of time.perf_counter().

    law:    a rank whose looks find it at another operation each time tells nothing but that it trains, once
    """

    def __init__(self, recorder: FlightRecorder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._recorder, self._clock = recorder, clock
        self._before: tuple[object, ...] = ()
        self._told: tuple[object, ...] = ()

    def look(self) -> Entry | None:
        """What is to be told, if it is new. `seconds`: for how long; `waits_for`: ranks of the whole run."""
        recorder = self._recorder
        waiting, latest, saving = recorder.waiting, recorder.latest, recorder.saving
        seen = (waiting, latest, latest.answered, saving)
        lasts, self._before = seen == self._before, seen
        state = "saving" if saving else "waiting" if lasts and waiting is not NOTHING else "training"
        at = (waiting if waiting is not NOTHING else latest) if lasts else NOTHING
        key = (state, at, waiting.waits_for if lasts else ())
        if key == self._told or latest is NOTHING:
            return None
        self._told = key
        return {"kind": "activity", "state": state, **(self._about(at, waiting is not NOTHING) if lasts else {})}

    def _about(self, at: NotedOperation, under_way: bool) -> dict[str, object]:
        rank, world = at.group
        since = at.began if under_way else at.answered or at.began
        return {
            "operation": at.name,
            "under_way": under_way,
            "number": at.number,
            "place": rank,
            "world": world,
            "step": at.step,
            "bucket": at.bucket,
            "buckets": self._recorder.buckets,
            "waits_for": list(at.waits_for) if under_way else [],
            "seconds": round(self._clock() - since, 3),
        }
