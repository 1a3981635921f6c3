"""Stall watchdog: limits how long a worker waits for connected peers that are silent (frozen, unreachable, or busy)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer import events
from gossamer.comm.environment.wait_progress import named_ranks as named
from gossamer.comm.environment.wait_timeout import USUAL_SECONDS, timeout_seconds
from gossamer.errors import PeerLost, require

NOTICE_SECONDS = 60.0
UNREACHABLE_SECONDS = 30.0
PAUSED_SECONDS = 30.0
SHORTEST_PAUSE_SECONDS = 2.0  # between two looks: a loaded machine may delay them

Unanswered = Callable[[int], float]  # seconds for which a rank's machine has not acknowledged data


@dataclass(frozen=True, kw_only=True)
class StallTimeouts:
    """How long a silence may last. Any byte from an awaited peer ends it."""

    notice_seconds: float = NOTICE_SECONDS  # after which the user is notified
    unreachable_seconds: float = UNREACHABLE_SECONDS  # without an acknowledgment: the machine is down or unreachable
    timeout_seconds: float = USUAL_SECONDS  # after which the group counts as broken
    paused_seconds: float = PAUSED_SECONDS  # between two looks: this process was paused, perhaps with all others
    clock: Callable[[], float] = time.monotonic  # in seconds

    def __post_init__(self) -> None:
        require(self.timeout_seconds > 0, f"timeout_seconds must be positive, got {self.timeout_seconds}")


def requested_timeouts() -> StallTimeouts:
    """Return timeouts with GOSSAMER_TIMEOUT. Raises ValueError."""
    return StallTimeouts(timeout_seconds=timeout_seconds())


class StallWatchdog:
    """Watches the peers that one operation waits for. Call `look` every second until the operation completes.

    A much longer time between two calls is no silence of peers: this process was stopped, as by a scheduler that
    suspends a job, a pause of its container, or a debugger.
    """

    def __init__(self, rank: int, patience: StallTimeouts, unanswered: Unanswered = lambda rank: 0.0) -> None:
        self._rank, self._patience, self._unanswered = rank, patience, unanswered
        self._since = self._looked = patience.clock()
        self._moved: Sequence[int] = ()
        self._warned = False
        self._paused_seconds = min(patience.paused_seconds, max(SHORTEST_PAUSE_SECONDS, patience.timeout_seconds / 2))

    def look(self, moved: Sequence[int], waited_for: Sequence[int]) -> None:
        """Check the silence. Raises PeerLost if it has lasted too long.

        Args:
            moved: By rank, counters that change with every byte from peers that the operation needs; -1 for others.
            waited_for: Ranks to name in messages.
        """
        now, patience = self._patience.clock(), self._patience
        if (gap := now - self._looked) > self._paused_seconds:
            self._since += gap  # peers are not silent while this process cannot receive
        self._looked = now
        if moved != self._moved:
            self._moved = moved
            self.end()
            self._since = now
        silent = now - self._since
        if silent >= patience.unreachable_seconds and (cut_off := self._cut_off()):
            raise PeerLost(
                f"{named(cut_off)} cannot be reached: its machine has acknowledged no data for {silent:.0f} s, "
                "so it is down or disconnected from this one"
            )
        if silent >= patience.timeout_seconds:
            raise PeerLost(
                f"{named(waited_for)} sent nothing for {silent:.0f} s, though connected: frozen, unreachable, or busy "
                "for too long. If such a pause is intended, set "
                f"GOSSAMER_TIMEOUT={2 * patience.timeout_seconds:g} on all ranks to wait twice as long"
            )
        if silent >= patience.notice_seconds and not self._warned:
            self._warned = True
            events.emit(events.Stalled(rank=self._rank, seconds=silent, waits_for=tuple(waited_for)))
            events.notice(
                f"rank {self._rank} has waited {silent:.0f} s for {named(waited_for)}: it may be busy (validating, "
                "saving), frozen, unreachable, or waiting itself. The wait is limited to "
                f"GOSSAMER_TIMEOUT={patience.timeout_seconds:g} seconds"
            )

    def _cut_off(self) -> list[int]:
        needed = [rank for rank, bytes_ in enumerate(self._moved) if bytes_ >= 0 and rank != self._rank]
        return [rank for rank in needed if self._unanswered(rank) >= self._patience.unreachable_seconds]

    def end(self) -> None:
        """Data has arrived."""
        if self._warned:
            seconds = self._patience.clock() - self._since
            events.notice(f"rank {self._rank} continued after {seconds:.0f} s")
        self._warned = False
