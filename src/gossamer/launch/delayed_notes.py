"""Delayed notes: show what a coordinator says a second later, unless the run has finished by then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

DELAY_SECONDS = 1.0


class DelayedNotes:
    """Notes of a coordinator, which sees connections close before the launcher knows that their workers have finished.

    Called by its threads; `look` by the launcher's, which says what is a second old, or drops everything where the run
    is over by then.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._waiting: deque[tuple[float, str]] = deque()

    def __call__(self, text: str) -> None:
        self._waiting.append((time.monotonic(), text))

    def look(self, now: float, is_over: Callable[[], bool]) -> None:
        while self._waiting and self._waiting[0][0] <= now - DELAY_SECONDS:
            if is_over():
                self._waiting.clear()
                return
            self._note(self._waiting.popleft()[1])
