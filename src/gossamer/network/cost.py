"""How long words take on a network: the moves of every rank in virtual time, on lines that carry one thing at a time.

A message takes its path's latency and its bytes over the rate of the slower of two lines (Hockney 1994), once its
receiver has said that it is ready: Gloo sends nothing before, so a message costs a round trip unless it was awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from gossamer.network.collectives import (
    Move,
    Moves,
    Receive,
    Received,
    Send,
    Sent,
    direct,
    neighbours,
    ring_mean,
    tree_broadcast,
)
from gossamer.network.link import Network, Path
from gossamer.network.tcp import ETHERNET, Stream, Tcp
from gossamer.words import Exchange, Gather, Mean, Mix, Together, Word, payload_bytes

SMALL_BYTES = 2**20  # of a mean that goes straight to its owners
ENVELOPE_BYTES = 48  # what Gloo puts before a message, and all there is to "ready to receive"


def parts_of(word: Word, rank: int, world: int) -> list[Moves]:
    """One rank's part in having a word answered: exchanges that go on side by side."""
    match word:
        case Mean(tensor) if tensor.element_size() < 4 or tensor.nbytes <= SMALL_BYTES:
            return [_direct_mean(rank, world, tensor.numel(), tensor.element_size())]
        case Mean(tensor):
            return [ring_mean(rank, world, tensor.nbytes, tensor.element_size())]
        case Gather(payload):
            return [direct(rank, world, [payload_bytes(payload)] * world)]
        case Exchange(parts):
            return [direct(rank, world, [payload_bytes(part) for part in parts])]
        case Mix(payload):
            return [neighbours(rank, word.told, word.hears, payload_bytes(payload))]
        case Together(words):
            return [moves for each in words for moves in parts_of(each, rank, world)]


def _direct_mean(rank: int, world: int, numel: int, itemsize: int) -> Moves:
    """Each part to its owner; each owner's sum to everyone."""
    sizes = [(numel // world + (owner < numel % world)) * itemsize for owner in range(world)]
    yield from direct(rank, world, sizes)
    yield from direct(rank, world, [sizes[rank]] * world)


def seconds(word: Word, network: Network, tcp: Tcp = ETHERNET) -> float:
    """How long a word takes when all ranks say it at once, over connections that were idle."""
    world = len(network.hosts)
    return max(Lines(network, tcp).answer([word] * world, [0.0] * world))


class Lines:
    """Answers words without sending anything: says when. Lines and connections remember what they carried."""

    def __init__(self, network: Network, tcp: Tcp = ETHERNET) -> None:
        self._network, self._tcp = network, tcp
        self.world = len(network.hosts)
        self._up = [0.0] * self.world
        self._down = [0.0] * self.world
        self._streams: dict[tuple[int, int], Stream] = {}

    def answer(self, words: Sequence[Word], starts: Sequence[float]) -> list[float]:
        """Rank r says words[r] at starts[r]; the moments at which they have their answers."""
        return self.run([parts_of(word, rank, self.world) for rank, word in enumerate(words)], starts)

    def broadcast(self, nbytes: int, starts: Sequence[float], source: int = 0) -> list[float]:
        return self.run([[tree_broadcast(rank, self.world, nbytes, source)] for rank in range(self.world)], starts)

    def run(self, moves: Sequence[Sequence[Moves]], starts: Sequence[float]) -> list[float]:
        """moves[r]: what rank r does, exchanges side by side. The moments at which each rank is done with all."""
        if self.world == 1:
            return list(starts)
        clock = _Clock()
        exchanges = [_Exchange(self, clock, [each[place] for each in moves], starts) for place in range(len(moves[0]))]
        clock.run()
        return [max(ends) for ends in zip(*(exchange.ends for exchange in exchanges), strict=True)]

    def depart(self, sender: int, receiver: int, nbytes: int, now: float) -> tuple[float, float]:
        """Put a message on its sender's line; the moments at which its first and its last byte leave."""
        wire_bytes = self._tcp.wire_bytes(nbytes + ENVELOPE_BYTES)
        stream = self._streams.setdefault((sender, receiver), Stream(self._tcp.initial_window_bytes))
        path, slower = self._network.path(sender, receiver), self._network.bits_per_second(sender, receiver)
        begin = max(now, stream.free_seconds)
        self._up[sender] = (
            max(self._up[sender], begin) + 8 * wire_bytes / self._network.hosts[sender].up_bits_per_second
        )
        stream.send(begin, wire_bytes, slower, path, self._tcp)
        stream.free_seconds = max(self._up[sender], stream.free_seconds)
        return begin, stream.free_seconds

    def arrive(self, sender: int, receiver: int, nbytes: int, begin: float, left: float) -> float:
        """Take a message that left from `begin` to `left` off the lines; the moment at which its last byte is there."""
        bits = 8 * self._tcp.wire_bytes(nbytes + ENVELOPE_BYTES)
        line = self._network.hosts[receiver].down_bits_per_second
        self._down[receiver] = max(self._down[receiver], begin) + bits / line
        return max(self._down[receiver], left) + _latency_seconds(self._network.path(sender, receiver))

    def notice(self, sender: int, receiver: int, now: float) -> float:
        """When a message of a few bytes arrives: it waits for what is queued before its sender's line."""
        line = self._network.hosts[sender].up_bits_per_second
        queued = min(max(0.0, self._up[sender] - now), 8 * self._tcp.queue_bytes / line)
        bits = 8 * self._tcp.wire_bytes(ENVELOPE_BYTES)
        sending = bits / self._network.bits_per_second(sender, receiver)
        return now + queued + sending + _latency_seconds(self._network.path(sender, receiver))


def _latency_seconds(path: Path) -> float:
    """One way. Exchanges go on when the last of several messages is there, so jitter mostly costs its deviation."""
    return path.round_trip_seconds / 2 + path.jitter_seconds


@dataclass
class _Clock:
    """What happens next, in the order of time."""

    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def at(self, moment: float, happen: Callable[[float], None]) -> None:
        heappush(self.events, (moment, next(self.numbers), happen))

    def run(self) -> None:
        while self.events:
            moment, _, happen = heappop(self.events)
            happen(moment)


@dataclass
class _Rank:
    """One rank within one exchange: its moves, and what came of those it has not waited for."""

    moves: Moves
    waiting: Move | None = None
    sent: deque[float] = field(default_factory=deque)
    received: deque[float] = field(default_factory=deque)


class _Exchange:
    """The moves of all ranks in one exchange. A message leaves when both ends have said so."""

    def __init__(self, lines: Lines, clock: _Clock, moves: Sequence[Moves], starts: Sequence[float]) -> None:
        self._lines, self._clock = lines, clock
        self._ranks = [_Rank(each) for each in moves]
        self._offers: dict[tuple[int, int], deque[tuple[float, int]]] = {}
        self._wishes: dict[tuple[int, int], deque[float]] = {}
        self.ends = list(starts)
        for rank, start in enumerate(starts):
            clock.at(start, partial(self._go_on, rank))

    def _go_on(self, rank: int, now: float) -> None:
        """Make moves until one has to wait."""
        mine = self._ranks[rank]
        while True:
            move = mine.waiting or next(mine.moves, None)
            mine.waiting = None
            match move:
                case Send(to, nbytes):
                    self._offers.setdefault((rank, to), deque()).append((now, nbytes))
                    self._match(rank, to)
                case Receive(of):
                    wish = self._lines.notice(rank, of, now)
                    self._wishes.setdefault((of, rank), deque()).append(wish)
                    self._match(of, rank)
                case Sent() | Received():
                    done = mine.sent if isinstance(move, Sent) else mine.received
                    if not done:
                        mine.waiting = move
                        return
                    done.popleft()
                case None:
                    self.ends[rank] = max(self.ends[rank], now)
                    return

    def _match(self, sender: int, receiver: int) -> None:
        offers, wishes = self._offers.get((sender, receiver)), self._wishes.get((sender, receiver))
        if offers and wishes:
            (offered, nbytes), wished = offers.popleft(), wishes.popleft()
            self._clock.at(max(offered, wished), partial(self._leave, sender, receiver, nbytes))

    def _leave(self, sender: int, receiver: int, nbytes: int, now: float) -> None:
        begin, left = self._lines.depart(sender, receiver, nbytes, now)
        self._clock.at(left, partial(self._arrive, sender, receiver, nbytes, begin))

    def _arrive(self, sender: int, receiver: int, nbytes: int, begin: float, now: float) -> None:
        arrived = self._lines.arrive(sender, receiver, nbytes, begin, now)
        self._clock.at(arrived, partial(self._complete, receiver, self._ranks[receiver].received))
        self._complete(sender, self._ranks[sender].sent, now)

    def _complete(self, rank: int, done: deque[float], now: float) -> None:
        done.append(now)
        if self._ranks[rank].waiting is not None:
            self._go_on(rank, now)
