"""A network in virtual time for peers that do not move in step: what a message takes, what gets lost, what breaks when.

Everything here is a description and draws from the generator it is given; gossamer.simulation runs peers over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from random import Random
from typing import Any, Protocol

from gossamer.core.peer_ops import Peer
from gossamer.core.rng import address
from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a message meets from one peer to another. Messages do not queue behind each other.

    seconds = round_trip_seconds / 2 + 8 payload bytes / bits_per_second + jitter

    jitter_seconds: mean and deviation of an exponential draw for every message, so that they overtake each other.
    loss, duplicate: shares of messages that never arrive, and that arrive twice.
    """

    round_trip_seconds: float = 0.0
    bits_per_second: float = inf
    jitter_seconds: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0

    def __post_init__(self) -> None:
        require(self.round_trip_seconds >= 0, f"a round trip takes at least 0 seconds, not {self.round_trip_seconds}")
        require(self.bits_per_second > 0, f"a rate is a positive number of bits per second, not {self.bits_per_second}")
        require(self.jitter_seconds >= 0, f"jitter is at least 0 seconds, not {self.jitter_seconds}")
        require(
            0 <= self.loss < 1,
            f"loss is a share of messages in [0, 1), not {self.loss}: where nothing arrives, write "
            "Cut(peers_a, peers_b, at=0)",
        )
        require(0 <= self.duplicate <= 1, f"duplicate is a share of messages in [0, 1], not {self.duplicate}")

    @property
    def latency_seconds(self) -> float:
        return self.round_trip_seconds / 2

    def sending_seconds(self, nbytes: int) -> float:
        """What passes before the last of `nbytes` has left its sender."""
        return 8 * nbytes / self.bits_per_second

    def travels(self, nbytes: int, late_seconds: float, random: Random) -> tuple[float, ...]:
        """Seconds after which a message arrives: nothing where it is lost, two where it is duplicated.

        late_seconds: a duplicate comes so much later at most.
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
    """What faults happen to."""

    def kill(self, peer: Peer) -> None: ...
    def restart(self, peer: Peer) -> None: ...
    def pause(self, peer: Peer, until: float) -> None: ...
    def resume(self, peer: Peer) -> None: ...
    def cut(self, ways: Iterable[tuple[Peer, Peer]]) -> None: ...
    def heal(self, ways: Iterable[tuple[Peer, Peer]]) -> None: ...


Happening = tuple[float, Callable[[MessageTarget], None]]


@dataclass(frozen=True)
class Kill:
    """A process ends without a word at `at` seconds. What it had not finished sending is lost, the rest perhaps."""

    peer: Peer
    at: float

    def happenings(self) -> Iterator[Happening]:
        yield self.at, lambda target: target.kill(self.peer)


@dataclass(frozen=True)
class Restart:
    """A killed process is started again at `at` seconds, with nothing but what its factory gives it.

    A peer that runs, or ended by itself, is left alone.
    """

    peer: Peer
    at: float

    def happenings(self) -> Iterator[Happening]:
        yield self.at, lambda target: target.restart(self.peer)


@dataclass(frozen=True)
class Pause:
    """A process is stopped at `at` for so many `seconds`: it hears and says nothing; what arrives waits for it."""

    peer: Peer
    at: float
    seconds: float

    def happenings(self) -> Iterator[Happening]:
        yield self.at, lambda target: target.pause(self.peer, self.at + self.seconds)
        yield self.at + self.seconds, lambda target: target.resume(self.peer)


@dataclass(frozen=True)
class Cut:
    """From `at` to `heal_at` seconds nothing passes between peers_a and peers_b; one_way: only from a to b.

    What would arrive meanwhile is lost.
    """

    peers_a: tuple[Peer, ...]
    peers_b: tuple[Peer, ...]
    at: float
    heal_at: float = inf
    one_way: bool = False

    @property
    def ways(self) -> tuple[tuple[Peer, Peer], ...]:
        there = tuple((a, b) for a in self.peers_a for b in self.peers_b if a != b)
        return there if self.one_way else there + tuple((b, a) for a, b in there)

    def happenings(self) -> Iterator[Happening]:
        yield self.at, lambda target: target.cut(self.ways)
        if self.heal_at < inf:
            yield self.heal_at, lambda target: target.heal(self.ways)


Fault = Kill | Restart | Pause | Cut


@dataclass(frozen=True, kw_only=True)
class VirtualNetwork:
    """Links between peers, how silence and loss are dealt with, and the faults that will happen.

    The first five fields are every pair's Link; links[a, b] is the way from a to b instead, and the way back where
    links[b, a] is not given.
    dead_after_seconds: a peer that was silent for so long has left. resend_seconds: what was lost is sent again so long
    after it was said.
    """

    round_trip_seconds: float = 0.0
    bits_per_second: float = inf
    jitter_seconds: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    dead_after_seconds: float = 5.0
    resend_seconds: float = 1.0
    faults: tuple[Fault, ...] = ()
    links: Mapping[tuple[Peer, Peer], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.dead_after_seconds > 0, f"dead_after_seconds is above 0, not {self.dead_after_seconds}")
        require(self.resend_seconds > 0, f"resend_seconds is above 0, not {self.resend_seconds}")
        _ = self.default  # its checks are ours

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
        """A bad network: a quarter of all messages lost and doubled at worst, and faults that are over by the horizon.

        mortal: who may be killed, and is then restarted; None: everyone. fields: what is not to be drawn.
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
    """Up to `most` of each: kills with their restarts, cuts that heal, pauses; the last ends before the horizon."""
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
    """A moment, and a later one: mostly short, sometimes long."""
    at = random.random() * horizon_seconds * 0.9
    return at, at + (horizon_seconds - at) * random.random() ** 2
