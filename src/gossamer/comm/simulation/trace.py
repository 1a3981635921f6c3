"""Trace: the outcome of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossamer.base.peer_ops import Peer
from gossamer.base.virtual_clock import VirtualClock
from gossamer.errors import GossamerError


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a peer's script."""

    moment: float
    result: Any = None
    error: GossamerError | None = None  # raised by the script
    killed: bool = False  # and not restarted

    def __str__(self) -> str:
        how = "was killed" if self.killed else f"ended with {self.error!r}" if self.error else "ended"
        return f"{how} at {self.moment}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Results, messages and payload bytes by (sender, receiver), including resends and duplicates."""

    seconds: float  # when the last peer except the servers ended
    ended: Mapping[Peer, Ended]
    sent_bytes: Mapping[tuple[Peer, Peer], int]
    received_bytes: Mapping[tuple[Peer, Peer], int]
    messages: int  # requests and answers, including resends
    resent: int  # requests that were sent again
    lost: int  # by the network, or with their sender or receiver
    duplicated: int  # by the network
    events: tuple[tuple[float, str], ...] = ()  # (time, text), if they were kept

    def result(self, peer: Peer) -> Any:
        """Return the result of a peer's script, or raise its error."""
        ended = self.ended[peer]
        if ended.error is not None:
            raise ended.error
        return ended.result

    def bytes_through(self, machine: Callable[[Peer], Hashable] = lambda peer: peer) -> Counter[Hashable]:
        """Return the payload bytes that each machine sent or received, without traffic within a machine.

        machine(peer): the peer's host. The busiest machine has `max(trace.bytes_through().values())` bytes.
        """
        through: Counter[Hashable] = Counter()
        for (sender, receiver), nbytes in self.sent_bytes.items():
            through[machine(sender)] += nbytes * (machine(sender) != machine(receiver))
        for (sender, receiver), nbytes in self.received_bytes.items():
            through[machine(receiver)] += nbytes * (machine(sender) != machine(receiver))
        return through


@dataclass(slots=True)
class TraceWriter:
    """A trace during its recording. Notes are only formatted if they are kept."""

    clock: VirtualClock
    keep: bool
    messages: int = 0
    resent: int = 0
    lost: int = 0
    duplicated: int = 0
    events: list[tuple[float, str]] = field(default_factory=list)

    def note(self, *what: object) -> None:
        if self.keep:
            self.events.append((self.clock.now, " ".join(map(str, what))))
