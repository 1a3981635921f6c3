"""What happened in a conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossamer.core.peer_ops import Peer
from gossamer.errors import GossamerError
from gossamer.simulation.clock import VirtualClock


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a peer's script ended, and when. error: why it gave up; killed: it was, and nobody started it again."""

    moment: float
    result: Any = None
    error: GossamerError | None = None
    killed: bool = False

    def __str__(self) -> str:
        how = "was killed" if self.killed else f"ended with {self.error!r}" if self.error else "ended"
        return f"{how} at {self.moment}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What happened. Bytes are of payloads, by (sender, receiver); what was sent again or arrived twice counts twice.

    seconds: when the last peer that was no server ended.
    messages: sent, answers and what was sent again included; resent: of these, words that were sent again;
    lost, duplicated: by the network, or with who should have sent or heard them.
    events: (moment, what), where they were kept.
    """

    seconds: float
    ended: Mapping[Peer, Ended]
    sent_bytes: Mapping[tuple[Peer, Peer], int]
    received_bytes: Mapping[tuple[Peer, Peer], int]
    messages: int
    resent: int
    lost: int
    duplicated: int
    events: tuple[tuple[float, str], ...] = ()

    def result(self, peer: Peer) -> Any:
        """What its script returned; raises what its script raised."""
        ended = self.ended[peer]
        if ended.error is not None:
            raise ended.error
        return ended.result

    def bytes_through(self, machine: Callable[[Peer], Hashable] = lambda peer: peer) -> Counter[Hashable]:
        """Payload bytes that each machine sent or received. machine(peer): where it lives; within one nothing counts.

        The busiest machine is `max(trace.bytes_through().values())`.
        """
        through: Counter[Hashable] = Counter()
        for (sender, receiver), nbytes in self.sent_bytes.items():
            through[machine(sender)] += nbytes * (machine(sender) != machine(receiver))
        for (sender, receiver), nbytes in self.received_bytes.items():
            through[machine(receiver)] += nbytes * (machine(sender) != machine(receiver))
        return through


@dataclass(slots=True)
class Diary:
    """What a trace will say, while it happens. Notes become text only where they are kept."""

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
