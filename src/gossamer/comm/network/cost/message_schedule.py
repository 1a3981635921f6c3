"""Message schedules: the moves of one rank in an exchange, as cut by Gloo or by a table of hops.

Pure functions of integers. Every exchange is a list of moves. SendCompleted and ReceiveCompleted wait for the oldest
send or receive that was not awaited yet. An eager send leaves before its receiver requests it with `Collect`. Sizes are
payload bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

from gossamer.algorithms.collectives import Collective, Does, bounds, others

SEGMENT_BYTES = 2**20
IN_FLIGHT = 2
CHUNK_BYTES = 2**18  # of a piece of a table
MOST_MESSAGES = 1000  # in a simulation of a table; above, fewer and larger chunks give nearly the same result faster


@dataclass(frozen=True)
class Send:
    """A message to a peer."""

    to: int
    nbytes: int
    eager: bool = False  # leaves at once, and is not awaited; otherwise leaves when its receiver is ready


@dataclass(frozen=True)
class Receive:
    of: int


@dataclass(frozen=True)
class SendCompleted:
    """Wait until a send has left."""


@dataclass(frozen=True)
class ReceiveCompleted:
    """Wait until a message has arrived."""


@dataclass(frozen=True)
class Collect:
    """Wait for the oldest unreceived eager message from `of`."""

    of: int


@dataclass(frozen=True)
class RankTurn:
    """Order the following moves behind those with lower numbers, among all exchanges of a rank at the same time."""

    number: int


Move = Send | Receive | SendCompleted | ReceiveCompleted | Collect | RankTurn
Moves = Iterator[Move]


def ring_mean(rank: int, world: int, nbytes: int, itemsize: int = 4) -> Moves:
    """Reduce-scatter, then all-gather, around the ring towards lower ranks, in segments, two of them in flight.

    Segments have at most 1 MiB and every rank owns the same number of them, so the last ones may be short or empty.
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
    """Two segments in flight; empty ones are neither sent nor awaited."""
    for place in range(len(sends) + IN_FLIGHT):
        done = place - IN_FLIGHT
        if done >= 0:
            yield from [ReceiveCompleted()] * bool(receives[done])
            yield from [SendCompleted()] * bool(sends[done])
        if place < len(sends):
            yield from [Receive(of)] * bool(receives[place])
            yield from [Send(to, sends[place])] * bool(sends[place])


def direct(rank: int, world: int, nbytes: Sequence[int]) -> Moves:
    """Send nbytes[j] directly to rank j, all at once, while all other ranks do the same."""
    others = [(rank + step) % world for step in range(1, world)]
    yield from (Receive(peer) for peer in reversed(others))
    yield from (Send(peer, nbytes[peer]) for peer in others)
    yield from _all(others)


def neighbors(rank: int, receivers: Sequence[int], senders: Sequence[int], nbytes: int) -> Moves:
    """Send the same payload to each of `receivers`, and receive a payload from each of `senders`."""
    to, of = ([peer for peer in peers if peer != rank] for peers in (receivers, senders))
    yield from (Send(peer, nbytes) for peer in to)
    yield from (Receive(peer) for peer in of)
    yield from (ReceiveCompleted() for _ in of)
    yield from (SendCompleted() for _ in to)


def _all(peers: Sequence[int]) -> Moves:
    for _ in peers:
        yield ReceiveCompleted()
        yield SendCompleted()


def tree_broadcast(rank: int, world: int, nbytes: int, source: int = 0) -> Moves:
    """Broadcast down a binomial tree: the number of ranks with the bytes doubles in every round.

    source: Thakur et al. 2005, IJHPCA
    """
    place, sends = (rank - source) % world, 0
    for distance in _powers_below(world):
        if place < distance and place + distance < world:
            sends += 1
            yield Send((rank + distance) % world, nbytes)
        elif distance <= place < 2 * distance:
            yield Receive((rank - distance) % world)
            yield ReceiveCompleted()
    yield from [SendCompleted()] * sends


def _powers_below(limit: int) -> list[int]:
    return [2**power for power in range((limit - 1).bit_length())]


def eager_direct(rank: int, world: int, nbytes: Sequence[int]) -> Moves:
    """Send nbytes[j] directly to rank j, all at once, without waiting until it is ready."""
    yield from (Send(peer, nbytes[peer], eager=True) for peer in others(rank, world))
    yield from (Collect(peer) for peer in others(rank, world))


def eager_neighbors(rank: int, receivers: Sequence[int], senders: Sequence[int], nbytes: int) -> Moves:
    """Send the same payload to each of `receivers` without waiting; then receive one from each of `senders`."""
    yield from (Send(peer, nbytes, eager=True) for peer in receivers if peer != rank)
    yield from (Collect(peer) for peer in senders if peer != rank)


def table_moves(collective: Collective, rank: int, world: int, numel: int, itemsize: int) -> list[Moves]:
    """Return a rank's part in a table of hops, for a tensor that is cut into equal pieces."""
    at = bounds(numel, collective.pieces(world))
    return sized_table_moves(collective, rank, world, [stop - first for first, stop in pairwise(at)], itemsize)


def sized_table_moves(
    collective: Collective, rank: int, world: int, numels: Sequence[int], itemsize: int = 1
) -> list[Moves]:
    """Return a rank's part in a table of hops: every chunk of every piece is a concurrent exchange.

    They begin in the order of the rank's table, first chunks first. Empty chunks are omitted. numels: elements of each
    piece.
    """
    largest_bytes = max(numels) * itemsize
    chunks = min(ceil(largest_bytes / CHUNK_BYTES), max(1, MOST_MESSAGES // _messages(collective, world)))
    first_turns = _turns(collective, rank, world)
    exchanges: list[Moves] = []
    for chunk in range(chunks):
        for piece, numel in enumerate(numels):
            size, longer = divmod(numel, chunks)
            if nbytes := (size + (chunk < longer)) * itemsize:
                turn = RankTurn(1 + chunk * len(first_turns) + first_turns[piece])
                exchanges.append(iter((turn, *_piece_moves(collective, rank, world, nbytes)[piece])))
    return exchanges


@lru_cache(maxsize=1024)
def _piece_moves(collective: Collective, rank: int, world: int, nbytes: int) -> tuple[tuple[Move, ...], ...]:
    """Return a rank's moves for every piece of `nbytes` bytes, by round: its send, then its receives."""
    moves: list[list[Move]] = [[] for _ in range(collective.pieces(world))]
    for hop in sorted(collective.hops(rank, world), key=lambda hop: (hop.round, hop.does is not Does.SEND)):
        move = Send(hop.peer, nbytes, eager=True) if hop.does is Does.SEND else Collect(hop.peer)
        for piece in hop.pieces:
            moves[piece].append(move)
    return tuple(map(tuple, moves))


@lru_cache(maxsize=1024)
def _turns(collective: Collective, rank: int, world: int) -> tuple[int, ...]:
    """Return the position of each piece in a rank's table."""
    met = dict.fromkeys(piece for hop in collective.hops(rank, world) for piece in hop.pieces)
    places = {piece: place for place, piece in enumerate(met)}
    return tuple(places.get(piece, 0) for piece in range(collective.pieces(world)))


@lru_cache(maxsize=1024)
def _messages(collective: Collective, world: int) -> int:
    """Return the number of messages of all ranks for one chunk of every piece; at least 1."""
    tables = (collective.hops(rank, world) for rank in range(world))
    return max(1, sum(len(hop.pieces) for table in tables for hop in table if hop.does is Does.SEND))
