"""Faulty network: links with latency, jitter, loss and duplicates, and faults scheduled in virtual time.

The classes here are descriptions, which draw from the given generator; the simulator executes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from random import Random
from typing import Any, Protocol

from gossamer.base.peer_ops import Peer
from gossamer.base.rng import address
from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link from one peer to another. Messages do not queue behind each other.

    seconds = round_trip_seconds / 2 + 8 payload bytes / bits_per_second + jitter
    """

    round_trip_seconds: float = 0.0
    bits_per_second: float = inf
    jitter_seconds: float = 0.0  # mean of an exponential delay per message, so messages can be reordered
    loss: float = 0.0  # fraction of messages that are lost
    duplicate: float = 0.0  # fraction of messages that arrive twice

    def __post_init__(self) -> None:
        require(self.round_trip_seconds >= 0, f"round_trip_seconds must be at least 0, got {self.round_trip_seconds}")
        require(self.bits_per_second > 0, f"bits_per_second must be positive, got {self.bits_per_second}")
        require(self.jitter_seconds >= 0, f"jitter_seconds must be at least 0, got {self.jitter_seconds}")
        require(
            0 <= self.loss < 1,
            f"loss is a fraction of messages and must be in [0, 1), got {self.loss}. If no message arrives, use "
            "Cut(peers_a, peers_b, at=0)",
        )
        require(0 <= self.duplicate <= 1, f"duplicate must be in [0, 1], got {self.duplicate}")

    @property
    def latency_seconds(self) -> float:
        return self.round_trip_seconds / 2

    def sending_seconds(self, nbytes: int) -> float:
        """Time until the sender has sent all of `nbytes`."""
        return 8 * nbytes / self.bits_per_second

    def delivery_delays(self, nbytes: int, late_seconds: float, random: Random) -> tuple[float, ...]:
        """Return the delays of a message's arrivals in seconds: empty if it is lost, two if it is duplicated.

        late_seconds: maximum additional delay of a duplicate.
        """
        if self.loss and random.random() < self.loss:
            return ()
        seconds = self.latency_seconds + self.sending_seconds(nbytes)
        if self.jitter_seconds:
            seconds += random.expovariate(1 / self.jitter_seconds)
        if self.duplicate and random.random() < self.duplicate:
            return seconds, seconds + random.random() * late_seconds
        return (seconds,)


class MessageTarget(Protocol):
    """The interface of a simulation to faults."""

    def kill(self, peer: Peer) -> None: ...
    def restart(self, peer: Peer) -> None: ...
    def pause(self, peer: Peer, until: float) -> None: ...
    def resume(self, peer: Peer) -> None: ...
    def cut(self, paths: Iterable[tuple[Peer, Peer]]) -> None: ...
    def heal(self, paths: Iterable[tuple[Peer, Peer]]) -> None: ...


Effect = tuple[float, Callable[[MessageTarget], None]]


@dataclass(frozen=True)
class Kill:
    """Kill a process at `at` seconds. Partially sent messages are lost, others may be."""

    peer: Peer
    at: float

    def effects(self) -> Iterator[Effect]:
        yield self.at, lambda target: target.kill(self.peer)


@dataclass(frozen=True)
class Restart:
    """Restart a killed process at `at` seconds from its factory. No effect if it was not killed."""

    peer: Peer
    at: float

    def effects(self) -> Iterator[Effect]:
        yield self.at, lambda target: target.restart(self.peer)


@dataclass(frozen=True)
class Pause:
    """Stop a process (SIGSTOP) at `at` for `seconds`; messages that arrive wait."""

    peer: Peer
    at: float
    seconds: float

    def effects(self) -> Iterator[Effect]:
        yield self.at, lambda target: target.pause(self.peer, self.at + self.seconds)
        yield self.at + self.seconds, lambda target: target.resume(self.peer)


@dataclass(frozen=True)
class Cut:
    """Network partition: from `at` to `heal_at` seconds messages between peers_a and peers_b are lost."""

    peers_a: tuple[Peer, ...]
    peers_b: tuple[Peer, ...]
    at: float
    heal_at: float = inf
    one_way: bool = False  # only messages from a to b

    @property
    def paths(self) -> tuple[tuple[Peer, Peer], ...]:
        there = tuple((a, b) for a in self.peers_a for b in self.peers_b if a != b)
        return there if self.one_way else there + tuple((b, a) for a, b in there)

    def effects(self) -> Iterator[Effect]:
        yield self.at, lambda target: target.cut(self.paths)
        if self.heal_at < inf:
            yield self.heal_at, lambda target: target.heal(self.paths)


Fault = Kill | Restart | Pause | Cut


@dataclass(frozen=True, kw_only=True)
class VirtualNetwork:
    """Links between peers, timeouts, and scheduled faults. The first five fields are the default Link."""

    round_trip_seconds: float = 0.0
    bits_per_second: float = inf
    jitter_seconds: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    dead_after_seconds: float = 5.0  # a peer that is silent for this long has left
    resend_seconds: float = 1.0  # time from sending a lost message to its resend
    faults: tuple[Fault, ...] = ()
    links: Mapping[tuple[Peer, Peer], Link] = field(default_factory=dict)  # [a, b]: a to b, and b to a without [b, a]

    def __post_init__(self) -> None:
        require(self.dead_after_seconds > 0, f"dead_after_seconds must be positive, got {self.dead_after_seconds}")
        require(self.resend_seconds > 0, f"resend_seconds must be positive, got {self.resend_seconds}")
        _ = self.default  # validates its fields

    @cached_property
    def default(self) -> Link:
        return Link(
            round_trip_seconds=self.round_trip_seconds,
            bits_per_second=self.bits_per_second,
            jitter_seconds=self.jitter_seconds,
            loss=self.loss,
            duplicate=self.duplicate,
        )

    def link(self, sender: Peer, receiver: Peer) -> Link:
        return self.links.get((sender, receiver)) or self.links.get((receiver, sender)) or self.default

    @classmethod
    def random(
        cls,
        seed: int,
        peers: Sequence[Peer],
        horizon_seconds: float,
        mortal: Sequence[Peer] | None = None,
        **fields: Any,
    ) -> VirtualNetwork:
        """Draw a bad network: at worst a quarter of all messages lost and duplicated. Faults end by the horizon.

        Args:
            seed: Seed of all draws.
            peers: All peers.
            horizon_seconds: Time by which faults end.
            mortal: Peers that may be killed and restarted; None: all.
            fields: Values of fields that are not drawn.
        """
        random = Random(address("bad network", seed))
        slow = random.choice((0.0, 0.001, 0.01, 0.1)) * horizon_seconds
        drawn: dict[str, Any] = {
            "round_trip_seconds": slow * random.random(),
            "jitter_seconds": slow * random.choice((0.0, 0.1, 1.0)),
            "loss": random.choice((0.0, 0.05, 0.25)),
            "duplicate": random.choice((0.0, 0.05, 0.25)),
            "dead_after_seconds": horizon_seconds * random.uniform(0.02, 0.2),
            "resend_seconds": horizon_seconds * random.uniform(0.005, 0.05),
            "faults": random_faults(random, peers, horizon_seconds, peers if mortal is None else mortal),
        }
        return cls(**(drawn | fields))


def random_faults(
    random: Random, peers: Sequence[Peer], horizon_seconds: float, mortal: Sequence[Peer], most: int = 3
) -> tuple[Fault, ...]:
    """Draw up to `most` each of kills with restarts, cuts that heal, and pauses. All end before the horizon."""
    found: list[Fault] = []
    for _ in range(random.randint(0, most) if mortal else 0):
        peer, (at, end) = random.choice(mortal), _span(random, horizon_seconds)
        found += Kill(peer, at), Restart(peer, end)
    for _ in range(random.randint(0, most) if len(peers) > 1 else 0):
        mixed, (at, end) = random.sample(peers, len(peers)), _span(random, horizon_seconds)
        size = random.randint(1, len(peers) - 1)
        found.append(Cut(tuple(mixed[:size]), tuple(mixed[size:]), at, end, one_way=random.random() < 0.3))
    for _ in range(random.randint(0, most)):
        peer, (at, end) = random.choice(peers), _span(random, horizon_seconds)
        found.append(Pause(peer, at, end - at))
    return tuple(found)


def _span(random: Random, horizon_seconds: float) -> tuple[float, float]:
    """Draw a time and a later one; mostly short intervals, sometimes long ones."""
    at = random.random() * horizon_seconds * 0.9
    return at, at + (horizon_seconds - at) * random.random() ** 2
