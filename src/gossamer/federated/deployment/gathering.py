"""Gathering: says now and then how many devices are there, while a round waits for more."""

from __future__ import annotations

from math import inf
from time import monotonic

from gossamer.federated.deployment.round_report import Line
from gossamer.federated.server.rounds import Rounds

FIRST_SECONDS, EVERY_SECONDS = 5.0, 60.0  # of waiting, until it is said, and said again though nothing changed


class Gathering:
    """Who is waited for. `look` is called often, by any one thread."""

    def __init__(self, rounds: Rounds, say: Line, gather_seconds: float = inf) -> None:
        self._rounds, self._say, self._gather_seconds = rounds, say, gather_seconds
        self._since = self._said_at = inf
        self._said = ""

    def look(self, moment: float | None = None) -> None:
        """moment: in seconds, of a clock that only goes forward."""
        now = monotonic() if moment is None else moment
        text = self._text()
        if not text:
            self._since = self._said_at = inf
            self._said = ""
            return
        self._since = min(self._since, now)
        is_new = text != self._said and now >= self._since + FIRST_SECONDS
        if is_new or now >= self._said_at + EVERY_SECONDS:
            self._say(text)
            self._said, self._said_at = text, now

    def _text(self) -> str:
        found = None if self._rounds.finished else self._rounds.gathered
        if found is None or found.here >= found.wanted:
            return ""
        patience = ""
        if self._gather_seconds < inf and found.wanted > 1:
            patience = f"; after {self._gather_seconds:g} s {found.then} those that are"
        return f"{found.here} of {found.wanted} {found.of} are here{patience}"
