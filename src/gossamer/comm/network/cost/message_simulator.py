"""Message simulator: the moves of every rank in virtual time, on lines that transmit one message at a time.

A message takes its path's latency plus its bytes over the bandwidth of its slowest line (Hockney 1994): the sender's,
the receiver's, the one between their sites if others send too, and those of a relay that forwards it. It leaves once
its receiver is known to be ready: Gloo sends nothing before, so a message costs a round trip unless its receive was
posted earlier. An eager message leaves as soon as the previous message on its connection has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.network.cost.message_schedule import (
    Collect,
    Move,
    Moves,
    RankTurn,
    Receive,
    ReceiveCompleted,
    Send,
    SendCompleted,
)
from gossamer.comm.network.model import Network, Path
from gossamer.comm.network.tcp_model import ETHERNET, Stream, Tcp

ENVELOPE_BYTES = 48  # Gloo's header of a message, and the whole of "ready to receive"
EAGER_ENVELOPE_BYTES = 16  # header of an eager message

Carried = Callable[[int, int, int, float], None]  # (sender, receiver, bytes, arrival of first bit); last bit: now
Then = Callable[[], None]


@dataclass
class SharedLine:
    """One direction between two sites. Receives messages in the order in which their senders finish sending them.

    Each uses the line's free time from its beginning on, in several parts if other messages occupy it in between:
    earliest deadline first, which delays no message if the line is as fast as all senders together, for any sizes.
    source: Horn 1974, Naval Research Logistics Quarterly
    """

    bits_per_second: float
    busy: list[tuple[float, float]] = field(default_factory=list)  # (begin, end) intervals, ascending, with gaps

    def carry(self, bits: float, begin: float) -> float:
        """Transmit `bits` that are available from `begin` on; return when the last one has passed."""
        later = []
        while self.busy and self.busy[-1][1] >= begin:
            later.append(self.busy.pop())
        first, now, left = begin, begin, bits / self.bits_per_second
        while later and later[-1][0] < now + left:
            start, end = later.pop()
            left -= max(0.0, start - now)  # transmitted in the gap before
            first, now = min(first, start), end
        self.busy += [(first, now + left), *reversed(later)]
        return now + left

    def free_at(self, now: float) -> float:
        """Return the first time from `now` on at which the line is idle, as far as known."""
        return next((max(now, end) for start, end in reversed(self.busy) if start <= now), now)


@dataclass
class SharedLines:
    """The shared lines of a network: one per direction between two sites with a rate on their path."""

    network: Network
    lines: dict[tuple[str, str], SharedLine] = field(default_factory=dict)

    def between(self, sender: int, receiver: int) -> tuple[SharedLine, ...]:
        """Return the lines that two hosts share with others: one at most, or two by a relay."""
        found = []
        for sites in self.network.legs(sender, receiver):
            rate = self.network.paths.get(frozenset(sites), self.network.default).bits_per_second
            if rate is not None:
                found.append(self.lines.setdefault(sites, SharedLine(rate)))
        return tuple(found)


@dataclass
class _Connection:
    """One direction between two hosts: its bandwidth, its stream, and the eager messages in its queue."""

    stream: Stream
    path: Path
    bits_per_second: float
    latency_seconds: float
    shared: tuple[SharedLine, ...]
    relay: int | None  # number of the host or relay that forwards its messages
    queue: deque[Callable[[], None]] = field(default_factory=deque)


class Wires:
    """Computes when messages arrive. Lines and connections keep their state.

    window_bytes: initial window of a connection; None for TCP's.
    """

    def __init__(self, network: Network, tcp: Tcp = ETHERNET, window_bytes: float | None = None) -> None:
        self._network, self._tcp = network, tcp
        self._window_bytes = tcp.initial_window_bytes if window_bytes is None else window_bytes
        self.world = len(network.hosts)
        self._up = [0.0] * (self.world + len(network.relays))
        self._down = [0.0] * (self.world + len(network.relays))
        self._shared, self._relaying = SharedLines(network), frozenset(network.relayed.values())
        self._connections: dict[tuple[int, int], _Connection] = {}

    def run(self, moves: Sequence[Sequence[Moves]], starts: Sequence[float]) -> list[float]:
        """Simulate exchanges, and return the time at which each rank has finished all of them.

        Args:
            moves: moves[r] has the concurrent exchanges of rank r. Equal indices are the same exchange.
            starts: Start time of each rank.
        """
        if self.world == 1:
            return list(starts)
        clock, ends = VirtualClock(), list(starts)
        for place in range(max(map(len, moves))):
            parts = [each[place] if place < len(each) else iter(()) for each in moves]
            _Exchange(self, clock, parts, starts, ends)
        clock.run()
        return ends

    def connection(self, sender: int, receiver: int) -> _Connection:
        found = self._connections.get((sender, receiver))
        if found is None:
            path, slowest = self._network.path(sender, receiver), self._network.bits_per_second(sender, receiver)
            shared, relay = self._shared.between(sender, receiver), self._network.relay(sender, receiver)
            found = _Connection(Stream(self._window_bytes), path, slowest, _latency_seconds(path), shared, relay)
            self._connections[sender, receiver] = found
        return found

    def depart(self, sender: int, receiver: int, nbytes: int, now: float) -> tuple[float, float]:
        """Put `nbytes`, envelope included, on the sender's line; return when the first and the last byte leave."""
        wire_bytes, connection = self._tcp.wire_bytes(nbytes), self.connection(sender, receiver)
        stream = connection.stream
        begin = max(now, stream.free_seconds)
        self._up[sender] = (
            max(self._up[sender], begin) + 8 * wire_bytes / self._network.hosts[sender].up_bits_per_second
        )
        stream.send(begin, wire_bytes, connection.bits_per_second, connection.path, self._tcp)
        stream.free_seconds = max(self._up[sender], stream.free_seconds)
        return begin, stream.free_seconds

    def cross(self, sender: int, receiver: int, nbytes: int, begin: float, left: float) -> tuple[float, float]:
        """Pass a message over the lines that its sender shares with others: that of two sites, those of a relay, and
        the download of a host that relays. Returns the begin and end of its transmission behind them.

        Later messages on the connection are delayed equally, so that the senders that share a line alternate.
        """
        connection = self.connection(sender, receiver)
        if not connection.shared and connection.relay is None and receiver not in self._relaying:
            return begin, left
        bits, passed = 8 * self._tcp.wire_bytes(nbytes), left
        for shared in connection.shared:
            passed = max(passed, shared.carry(bits, begin + (passed - left)))
        if receiver in self._relaying:
            passed = self._reach(receiver, bits, begin + (passed - left), passed)
        if connection.relay is not None:
            passed = self._forward(connection.relay, bits, begin + (passed - left), passed)
        connection.stream.free_seconds = max(connection.stream.free_seconds, passed)
        return begin + (passed - left), passed

    def _forward(self, relay: int, bits: float, begin: float, left: float) -> float:
        """Pass a relay's download and upload, which also carry its own messages and those of other pairs. The relay
        forwards each bit when it has it. Returns when the last one has left."""
        line, received = self._network.line(relay), self._reach(relay, bits, begin, left)
        first = received - max(bits / line.down_bits_per_second, left - begin)
        self._up[relay] = max(self._up[relay], first) + bits / line.up_bits_per_second
        return max(self._up[relay], received)

    def _reach(self, host: int, bits: float, begin: float, left: float) -> float:
        """Pass a host's download with a message that left from `begin` to `left`; return when the last bit has."""
        self._down[host] = max(self._down[host], begin) + bits / self._network.line(host).down_bits_per_second
        return max(self._down[host], left)

    def arrive(self, sender: int, receiver: int, nbytes: int, begin: float, left: float) -> float:
        """Receive a message that left from `begin` to `left`; return the arrival of its last byte."""
        latency = self.connection(sender, receiver).latency_seconds
        if receiver in self._relaying:  # its download was passed before
            return left + latency
        return self._reach(receiver, 8 * self._tcp.wire_bytes(nbytes), begin, left) + latency

    def post(self, clock: VirtualClock, sender: int, receiver: int, nbytes: int, left: Then, arrived: Then) -> None:
        """Send a message behind earlier ones of its connection, so that a slow connection does not block the line.

        Args:
            clock: of all messages on these lines.
            sender: number of the host.
            receiver: number of the host.
            nbytes: of the message, header included.
            left: called when its last byte has left the lines of the sender, between sites, and of a relay.
            arrived: called when its last byte has arrived.
        """
        queue = self.connection(sender, receiver).queue
        queue.append(partial(self.start, clock, sender, receiver, nbytes, left, arrived))
        if len(queue) == 1:
            queue[0]()

    def start(self, clock: VirtualClock, sender: int, receiver: int, nbytes: int, left: Then, arrived: Then) -> None:
        """Send the first message of a connection's queue."""

        def posted(sender: int, receiver: int, nbytes: int, begin: float) -> None:
            clock.at(self.arrive(sender, receiver, nbytes, begin, clock.now), arrived)
            left()
            queue = self.connection(sender, receiver).queue
            queue.popleft()
            if queue:
                queue[0]()

        begin, gone = self.depart(sender, receiver, nbytes, clock.now)
        clock.at(gone, self.cross_at, clock, sender, receiver, nbytes, begin, posted)

    def cross_at(
        self, clock: VirtualClock, sender: int, receiver: int, nbytes: int, begin: float, then: Carried
    ) -> None:
        """Pass the lines between both ends. A message without delay continues at once, in its turn among the events of
        this time."""
        begin, passed = self.cross(sender, receiver, nbytes, begin, clock.now)
        if passed > clock.now:
            clock.at(passed, then, sender, receiver, nbytes, begin)
        else:
            then(sender, receiver, nbytes, begin)

    def notice(self, sender: int, receiver: int, now: float) -> float:
        """Return when a small message arrives: it waits in the queues of all lines except the receiver's."""
        connection = self.connection(sender, receiver)
        at = self._queued_until(now, self._up[sender], self._network.hosts[sender].up_bits_per_second)
        for shared in connection.shared:
            at = self._queued_until(at, shared.free_at(at), shared.bits_per_second)
        bits = 8 * self._tcp.wire_bytes(ENVELOPE_BYTES)
        return at + bits / connection.bits_per_second + connection.latency_seconds

    def _queued_until(self, now: float, free_at: float, bits_per_second: float) -> float:
        return now + min(max(0.0, free_at - now), 8 * self._tcp.queue_bytes / bits_per_second)


def _latency_seconds(path: Path) -> float:
    """One-way latency. Exchanges wait for the last of several messages, so jitter mostly costs its deviation."""
    return path.round_trip_seconds / 2 + path.jitter_seconds


@dataclass
class _Rank:
    """One rank within one exchange: its moves, and the results that it has not awaited."""

    moves: Moves
    waiting: Move | None = None
    sent: deque[float] = field(default_factory=deque)
    received: deque[float] = field(default_factory=deque)
    received_counts: dict[int, int] = field(default_factory=dict)


class _Exchange:
    """The moves of all ranks in one exchange. Raises `ends` to the time at which each rank has finished."""

    def __init__(
        self, wires: Wires, clock: VirtualClock, moves: Sequence[Moves], starts: Sequence[float], ends: list[float]
    ) -> None:
        self._wires, self._clock, self._ends = wires, clock, ends
        self._ranks = [_Rank(each) for each in moves]
        self._offers: dict[tuple[int, int], deque[tuple[float, int]]] = {}
        self._requests: dict[tuple[int, int], deque[float]] = {}
        for rank, start in enumerate(starts):
            clock.at(start, self._go_on, rank)

    def _go_on(self, rank: int) -> None:
        """Execute moves until one must wait."""
        state, now = self._ranks[rank], self._clock.now
        while True:
            move = state.waiting or next(state.moves, None)
            state.waiting = None
            match move:
                case Collect(of):
                    if not state.received_counts.get(of):
                        state.waiting = move
                        return
                    state.received_counts[of] -= 1
                case Send(to, nbytes, True):
                    self._post(rank, to, nbytes + EAGER_ENVELOPE_BYTES)
                case Send(to, nbytes):
                    self._offers.setdefault((rank, to), deque()).append((now, nbytes + ENVELOPE_BYTES))
                    self._match(rank, to)
                case Receive(of):
                    request = self._wires.notice(rank, of, now)
                    self._requests.setdefault((of, rank), deque()).append(request)
                    self._match(of, rank)
                case SendCompleted() | ReceiveCompleted():
                    done = state.sent if isinstance(move, SendCompleted) else state.received
                    if not done:
                        state.waiting = move
                        return
                    done.popleft()
                case RankTurn(number):
                    self._clock.at(now, self._go_on, rank, turn=number)
                    return
                case None:
                    self._ends[rank] = max(self._ends[rank], now)
                    return

    # -- messages that leave when both ends are ready ------------------------------------------------------------------

    def _match(self, sender: int, receiver: int) -> None:
        offers, requests = self._offers.get((sender, receiver)), self._requests.get((sender, receiver))
        if offers and requests:
            (offered, nbytes), requested_at = offers.popleft(), requests.popleft()
            self._clock.at(max(offered, requested_at), self._leave, sender, receiver, nbytes)

    def _leave(self, sender: int, receiver: int, nbytes: int) -> None:
        begin, left = self._wires.depart(sender, receiver, nbytes, self._clock.now)
        self._clock.at(left, self._wires.cross_at, self._clock, sender, receiver, nbytes, begin, self._arrive)

    def _arrive(self, sender: int, receiver: int, nbytes: int, begin: float) -> None:
        arrived = self._wires.arrive(sender, receiver, nbytes, begin, self._clock.now)
        self._clock.at(arrived, self._complete, receiver, self._ranks[receiver].received)
        self._complete(sender, self._ranks[sender].sent)

    def _complete(self, rank: int, done: deque[float]) -> None:
        done.append(self._clock.now)
        if self._ranks[rank].waiting is not None:
            self._go_on(rank)

    # -- eager messages ------------------------------------------------------------------------------------------------

    def _post(self, sender: int, receiver: int, nbytes: int) -> None:
        def left() -> None:
            self._ends[sender] = max(self._ends[sender], self._clock.now)

        self._wires.post(self._clock, sender, receiver, nbytes, left, partial(self._received, sender, receiver))

    def _received(self, sender: int, receiver: int) -> None:
        state = self._ranks[receiver]
        state.received_counts[sender] = state.received_counts.get(sender, 0) + 1
        if state.waiting is not None:
            self._go_on(receiver)
