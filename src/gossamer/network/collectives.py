"""Who sends what to whom, in order: one rank's part in an exchange, as Gloo cuts it.

Pure functions of integers. Every exchange is a list of moves; Sent and Received wait for the oldest send or receive
that nobody has waited for yet. Sizes are payload bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

SEGMENT_BYTES = 2**20
IN_FLIGHT = 2


@dataclass(frozen=True)
class Send:
    to: int
    nbytes: int


@dataclass(frozen=True)
class Receive:
    of: int


@dataclass(frozen=True)
class Sent:
    """Wait until a send has left."""


@dataclass(frozen=True)
class Received:
    """Wait until a message is here."""


Move = Send | Receive | Sent | Received
Moves = Iterator[Move]


def ring_mean(rank: int, world: int, nbytes: int, itemsize: int = 4) -> Moves:
    """Reduce-scatter, then all-gather, around the ring towards lower ranks, in segments of which two are under way.

    Segments hold at most 1 MiB and every rank owns equally many of them, so the last ones may be short or empty.
    source: Patarasuk & Yuan 2009, JPDC
    """
    each = max(IN_FLIGHT, ceil(nbytes / SEGMENT_BYTES / world))
    segment_bytes = ceil(ceil(nbytes / (each * world)) / itemsize) * itemsize
    for owner in (rank + 1, rank):
        segments = range(owner * each, (owner + world - 1) * each)
        sends = [_length(segment, each * world, segment_bytes, nbytes) for segment in segments]
        receives = [_length(segment + each, each * world, segment_bytes, nbytes) for segment in segments]
        yield from _windowed((rank - 1) % world, (rank + 1) % world, sends, receives)


def _length(segment: int, segments: int, segment_bytes: int, nbytes: int) -> int:
    return max(0, min(segment_bytes, nbytes - segment % segments * segment_bytes))


def _windowed(to: int, of: int, sends: Sequence[int], receives: Sequence[int]) -> Moves:
    """Two under way; what is empty is neither sent nor waited for."""
    for place in range(len(sends) + IN_FLIGHT):
        done = place - IN_FLIGHT
        if done >= 0:
            yield from [Received()] * bool(receives[done])
            yield from [Sent()] * bool(sends[done])
        if place < len(sends):
            yield from [Receive(of)] * bool(receives[place])
            yield from [Send(to, sends[place])] * bool(sends[place])


def direct(rank: int, world: int, nbytes: Sequence[int]) -> Moves:
    """nbytes[j] straight to rank j, all at once, while everyone else does the same."""
    others = [(rank + step) % world for step in range(1, world)]
    yield from (Receive(peer) for peer in reversed(others))
    yield from (Send(peer, nbytes[peer]) for peer in others)
    yield from _all(others)


def neighbours(rank: int, tells: Sequence[int], hears: Sequence[int], nbytes: int) -> Moves:
    """The same payload to everyone it is told, and theirs from those who are heard."""
    to, of = ([peer for peer in peers if peer != rank] for peers in (tells, hears))
    yield from (Send(peer, nbytes) for peer in to)
    yield from (Receive(peer) for peer in of)
    yield from (Received() for _ in of)
    yield from (Sent() for _ in to)


def _all(peers: Sequence[int]) -> Moves:
    for _ in peers:
        yield Received()
        yield Sent()


def tree_broadcast(rank: int, world: int, nbytes: int, source: int = 0) -> Moves:
    """Down a binomial tree: with every round twice as many ranks have it.

    source: Thakur et al. 2005, IJHPCA
    """
    place, sends = (rank - source) % world, 0
    for distance in _powers_below(world):
        if place < distance and place + distance < world:
            sends += 1
            yield Send((rank + distance) % world, nbytes)
        elif distance <= place < 2 * distance:
            yield Receive((rank - distance) % world)
            yield Received()
    yield from [Sent()] * sends


def _powers_below(limit: int) -> list[int]:
    return [2**power for power in range((limit - 1).bit_length())]
