"""Restart policy: decides whether one worker is started again after a loss, and how soon."""

from __future__ import annotations

# A start that is over sooner is one that the next would likely meet again
SETTLED_SECONDS = 10.0
LONGEST_SECONDS = 60.0


class RestartPolicy:
    """At most `most` restarts of one worker: the first at once, and 1, 2, 4... s after each that lived for less than
    SETTLED_SECONDS, at most LONGEST_SECONDS."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self._short_lives = 0  # in a row

    @property
    def exhausted(self) -> bool:
        return self.taken >= self.most

    def delay(self, age_seconds: float) -> float:
        """Take one restart; the seconds until it. age_seconds: how long the start that is over has lived."""
        again = self.taken > 0 and age_seconds < SETTLED_SECONDS
        self._short_lives = self._short_lives + 1 if again else 0
        self.taken += 1
        return min(2.0 ** (self._short_lives - 1), LONGEST_SECONDS) if again else 0.0
