"""Relay: members that cannot connect to each other are connected through the coordinator's port, and sealed."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from support.fault_seeds import block_name, blocks, replayed
from support.limited_machines import limited
from support.view_listeners import check_connected

from gossamer.base.ops import AllReduceMean
from gossamer.base.peer_ops import Peer
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP, available
from gossamer.comm.elastic import relay as module
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.relay import BUFFER_BYTES, GO, PAIR, RELAY, Relay, RelayServer, _End, detour
from gossamer.comm.elastic.view_listener import ViewListener
from gossamer.comm.membership import Member, View
from gossamer.comm.membership.messages import COORDINATOR, RELAY_SERVER
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.comm.mesh import connection_candidates, greeter
from gossamer.comm.mesh.connection_candidates import Approach
from gossamer.comm.mesh.greeter import Detour
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.sealing import LinkKeys
from gossamer.comm.mesh.standalone import OwnRoutes, standalone_mesh
from gossamer.comm.network.tcp_model import ETHERNET
from gossamer.errors import ConnectError, GossamerError

TOKEN, LOOPBACK = bytes(range(32)), "127.0.0.1"
DIRECT = CoordinatorOptions(least=1, most=4, initial=1)
RELAYED = replace(DIRECT, relays=True)
Sockets = list[socket.socket | None]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection_candidates.BEGIN_SECONDS, Approach.RELAYED, 0.05)
    monkeypatch.setitem(connection_candidates.AGAIN_SECONDS, Approach.RELAYED, 0.3)
    monkeypatch.setenv("GOSSAMER_SHARED_MEMORY", "0")  # all bytes pass the connections


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def server(notes: list[str]) -> Iterator[CoordinatorServer]:
    with closing(CoordinatorServer(RELAYED, token=TOKEN, address=LOOPBACK, journal=None, note=notes.append)) as server:
        yield server


def closed_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


class Group:
    """Members in threads. Some cannot be reached directly: the view contains a port where nothing listens."""

    def __init__(self, count: int, unreachable: set[int], relay: tuple[str, int], token: bytes = TOKEN) -> None:
        self.listeners = [ViewListener(LOOPBACK) for _ in range(count)]
        self.ways = [detour(relay, token)]
        ports = [
            closed_port() if place in unreachable else each.address[1] for place, each in enumerate(self.listeners)
        ]
        members = tuple(Member(number=1000 + place, host=LOOPBACK, port=port) for place, port in enumerate(ports))
        self.view = View(number=2, members=members, newcomers=frozenset(), secret=bytes(32))
        self.keys: list[dict[int, LinkKeys]] = [{} for _ in members]
        self.relayed: list[dict[int, int]] = [{} for _ in members]
        self.sealed = [True] * count
        self.ends: list[Sockets] = []
        self.links: Links | None = None  # of the last mean

    def meet(self, seconds: float = 20.0) -> list[Sockets]:
        def one(place: int) -> Sockets:
            keys = self.keys[place] if self.sealed[place] else None
            meet, relayed = self.listeners[place].meet, self.relayed[place]
            return meet(self.view, 1000 + place, TOKEN, seconds, lambda: False, self.ways, keys, relayed)

        with ThreadPoolExecutor(len(self.listeners)) as pool:
            tickets = [pool.submit(one, place) for place in range(len(self.listeners))]
        self.ends = [ticket.result() for ticket in tickets]
        return self.ends

    def means(self, elements: int = 300_000) -> list[float]:
        """The mean of rank + 1 over the connections, at each member. Raises GossamerError if one is broken."""

        def one(rank: int) -> float:
            with ExitStack() as open_meshes:
                routes = OwnRoutes(COORDINATOR.number if rank == 0 else None, self.relayed[rank])
                transport = standalone_mesh(
                    rank, self.ends[rank], "auto", None, gives_notice=False, keys=self.keys[rank], routes=routes
                )
                self.links = transport.known_links
                open_meshes.callback(transport.close)
                mean = torch.full((elements,), rank + 1.0)
                found = transport.begin(AllReduceMean(mean))()
                assert found.unique().numel() == 1
                return float(found[0])

        with ThreadPoolExecutor(len(self.ends)) as pool:
            return list(pool.map(one, range(len(self.ends))))

    def close(self) -> None:
        for each in (*self.listeners, *(each for end in self.ends for each in end if each is not None)):
            each.close()


@pytest.mark.parametrize("unreachable", [{0}, {0, 1}, {0, 1, 2}, {1}])
def test_members_that_cannot_be_reached_are_connected_by_the_relay(
    server: CoordinatorServer, notes: list[str], unreachable: set[int]
) -> None:
    with closing(Group(3, unreachable, server.address)) as group:
        check_connected(group.meet())
        for low, high in combinations(range(3), 2):  # the higher rank calls the lower one
            by_relay = COORDINATOR.number if low in unreachable else None
            assert group.relayed[low].get(high) == group.relayed[high].get(low) == by_relay
    assert len([note for note in notes if "passes this machine" in note]) == 1


def test_the_relay_is_not_used_where_members_reach_each_other(server: CoordinatorServer, notes: list[str]) -> None:
    with closing(Group(3, set(), server.address)) as group:
        check_connected(group.meet())
    assert not notes


def test_both_members_use_the_same_way_if_both_ways_succeed_at_once(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection_candidates.BEGIN_SECONDS, Approach.RELAYED, 0.0)
    with closing(Group(3, set(), server.address)) as group:
        for _ in range(20):
            check_connected(group.meet())
            for each in [each for end in group.ends for each in end if each is not None]:
                each.close()
            group.view = replace(group.view, number=group.view.number + 2)


def test_both_ends_of_a_pair_have_the_same_keys_in_exchanged_roles(server: CoordinatorServer) -> None:
    with closing(Group(3, {0}, server.address)) as group:
        group.meet()
    seen = set()
    for rank, keys in enumerate(group.keys):
        assert set(keys) == {0, 1, 2} - {rank}
        for peer, link in keys.items():
            other = group.keys[peer][rank]
            assert (link.cipher, link.sends, link.receives) == (other.cipher, other.receives, other.sends)
            seen |= {link.sends, link.receives}
    assert len(seen) == 6  # different for each direction of each pair


def test_members_average_through_the_relay(server: CoordinatorServer) -> None:
    with closing(Group(2, {0, 1}, server.address)) as group:
        group.meet()
        assert group.means() == [1.5] * 2


def test_all_members_know_which_pairs_share_which_relay(server: CoordinatorServer) -> None:
    with closing(Group(3, {1}, server.address)) as group:
        group.meet()
        assert group.means() == [2.0] * 3
        links = group.links
    assert links is not None
    assert links.relayed == ((0, 0, 0), (0, 0, 1), (0, 1, 0))
    assert [(each.number, each.rank) for each in links.relays] == [(COORDINATOR.number, 0)]
    assert links.network.relayed == {frozenset((1, 2)): 0}


def test_bytes_of_the_relay_s_own_member_load_no_other_line(server: CoordinatorServer) -> None:
    """Only the relay's port is open: the other members reach the one on its machine by the relay, too."""
    with closing(Group(3, {0, 1, 2}, server.address)) as group:
        group.meet()
        assert group.means() == [2.0] * 3
        links = group.links
    assert links is not None
    assert links.relayed == ((0, 1, 1), (1, 0, 1), (1, 1, 0))
    assert links.network.relayed == {frozenset((1, 2)): 0}


@pytest.mark.skipif(not available(), reason="the compiled loops are missing")
@pytest.mark.parametrize("rate", [None, 400e6])
def test_relayed_bytes_count_in_both_directions_and_within_the_limits(
    notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float | None
) -> None:
    """Only the relay is limited here: the members are on other machines."""
    monkeypatch.setattr("gossamer.comm.mesh.native_mesh.current", lambda: None)
    monkeypatch.setattr("gossamer.comm.rpc.connections_and_heartbeats.meter_of", lambda sock: None)
    elements = 300_000
    with (
        limited(tmp_path, up=rate, down=rate) as bandwidth,
        closing(CoordinatorServer(RELAYED, token=TOKEN, address=LOOPBACK, journal=None, note=notes.append)) as server,
        closing(Group(2, {0, 1}, server.address)) as group,
    ):
        group.meet()
        before = bandwidth.counted_way(UP), bandwidth.counted_way(DOWN)
        assert group.means(elements) == [1.5] * 2
        counted = bandwidth.counted_way(UP) - before[0], bandwidth.counted_way(DOWN) - before[1]
    assert min(counted) >= ETHERNET.wire_bytes(2 * 4 * elements)


@pytest.mark.parametrize("unreachable", [set(), {0, 1}])
def test_a_member_that_does_not_seal_is_not_connected(server: CoordinatorServer, unreachable: set[int]) -> None:
    with closing(Group(2, unreachable, server.address)) as group:
        group.sealed[1] = False
        with pytest.raises(ConnectError):
            group.meet(seconds=1.0)


def test_a_worker_without_the_token_cannot_use_the_relay(server: CoordinatorServer, notes: list[str]) -> None:
    with (
        closing(Group(2, {0, 1}, server.address, token=bytes(32))) as group,
        pytest.raises(ConnectError, match=r"relay|refused"),
    ):
        group.meet(seconds=1.0)
    assert not notes


def test_a_run_without_a_relay_does_not_relay() -> None:
    with (
        closing(CoordinatorServer(DIRECT, token=TOKEN, address=LOOPBACK, journal=None, note=print)) as server,
        closing(Group(2, {0, 1}, server.address)) as group,
        pytest.raises(ConnectError),
    ):
        group.meet(seconds=1.0)


def test_a_relay_that_ends_is_noticed_by_both_members(server: CoordinatorServer) -> None:
    with closing(Group(2, {0, 1}, server.address)) as group:
        ends = group.meet()
        server.close()
        for end in (ends[0][1], ends[1][0]):
            assert end is not None
            end.settimeout(20.0)
            with suppress(ConnectionError):
                assert end.recv(1) == b""


# -- relays on other machines ------------------------------------------------------------------------------------------


@pytest.fixture
def other(server: CoordinatorServer, notes: list[str]) -> Iterator[RelayServer]:
    with closing(RelayServer(server.address, TOKEN, (LOOPBACK, 0), (), notes.append)) as other:
        wait_until(lambda: server._coordinator.relays)
        yield other


def way_by(server: CoordinatorServer) -> Callable[[int, int, int], Detour]:
    """The first relay that a view names."""
    first = server._coordinator.relays[0]
    return detour((first.host, first.port), TOKEN, Peer(RELAY_SERVER, first.number))


def test_members_are_connected_by_a_relay_on_another_machine(server: CoordinatorServer, other: RelayServer) -> None:
    assert [(each.host, each.port) for each in server._coordinator.relays] == list(other.addresses)
    with closing(Group(3, {0, 1}, server.address)) as group:
        group.ways = [way_by(server)]
        check_connected(group.meet())
        assert group.relayed[0] == {1: other.me.number, 2: other.me.number}
    assert other.forwarded_bytes > 0
    assert server._relay is not None
    assert server._relay.forwarded_bytes == 0


@pytest.mark.parametrize("slow", ["coordinator", "other"])
def test_members_use_the_relay_that_connects_them_first(
    server: CoordinatorServer, other: RelayServer, slow: str
) -> None:
    assert server._relay is not None
    relays = {"coordinator": server._relay, "other": other._relay}
    relays[slow]._name = lambda end: None  # type: ignore[method-assign]  # it does not pair the members
    with closing(Group(2, {0, 1}, server.address)) as group:
        group.ways = [*group.ways, way_by(server)]
        check_connected(group.meet())
    assert {name: relay.forwarded_bytes > 0 for name, relay in relays.items()} == {
        name: name != slow for name in relays
    }


def test_a_relay_that_has_ended_is_not_named_to_members(server: CoordinatorServer, other: RelayServer) -> None:
    other.close()
    wait_until(lambda: not server._coordinator.relays)


def test_a_relay_is_refused_by_a_run_that_does_not_seal() -> None:
    notes: list[str] = []
    with (
        closing(CoordinatorServer(DIRECT, token=TOKEN, address=LOOPBACK, journal=None, note=print)) as server,
        closing(RelayServer(server.address, TOKEN, (LOOPBACK, 0), (), notes.append)),
    ):
        wait_until(lambda: notes)
        assert "start its first launcher with --relay" in notes[0]
        assert not server._coordinator.relays


def test_a_relay_of_another_run_is_refused(server: CoordinatorServer) -> None:
    with closing(RelayServer(server.address, bytes(32), (LOOPBACK, 0), (), print)) as stranger:
        wait_until(lambda: not any(each.thread.is_alive() for each in stranger._endpoint._handles))
        assert not server._coordinator.relays


# -- an attacker in place of the relay ---------------------------------------------------------------------------------


class Tampering(Relay):
    """A relay that changes what it forwards, after some bytes of one direction."""

    def __init__(self, change: Callable[[bytearray], None], after_bytes: int) -> None:
        super().__init__(lambda text: None)
        self._change, self._left = change, after_bytes

    def _send(self, source: _End, sink: _End) -> None:
        if self._left > 0 and len(source.buffer) >= 64:
            self._left -= len(source.buffer)
            if self._left <= 0:
                self._change(source.buffer)
        super()._send(source, sink)


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def drop(data: bytearray) -> None:
    del data[len(data) // 2 : len(data) // 2 + 8]


def repeat(data: bytearray) -> None:
    data += data[-64:]


def insert(data: bytearray) -> None:
    data[0:0] = bytes(16)


@pytest.mark.parametrize("change", [flip, drop, repeat, insert])
@pytest.mark.parametrize("after_bytes", [1000, 100_000])
def test_changed_bytes_are_detected(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytearray], None], after_bytes: int
) -> None:
    """In the first messages or in the middle of a tensor: no member returns a wrong mean."""
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "5")
    with closing(Tampering(change, after_bytes)) as tampering:
        server._endpoint._dispatcher._options.hand_over[RELAY] = tampering.take  # type: ignore[index]
        with closing(Group(2, {0, 1}, server.address)) as group:
            group.meet()
            with pytest.raises(GossamerError):
                group.means()
        assert tampering._left <= 0


@pytest.mark.parametrize("change", [flip, drop, insert])
def test_a_changed_handshake_fails_and_the_members_connect_again(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytearray], None]
) -> None:
    monkeypatch.setattr(greeter, "STRANGER_SECONDS", 0.5)
    with closing(Tampering(change, 64)) as tampering:
        server._endpoint._dispatcher._options.hand_over[RELAY] = tampering.take  # type: ignore[index]
        with closing(Group(2, {0, 1}, server.address)) as group:
            check_connected(group.meet())
        assert tampering._left <= 0


def test_the_relay_does_not_see_the_tensors(server: CoordinatorServer) -> None:
    seen = bytearray()
    with closing(Tampering(lambda data: None, 2**40)) as listening:
        original = listening._send

        def keep(source: _End, sink: _End) -> None:
            seen.extend(source.buffer)
            original(source, sink)

        listening._send = keep  # type: ignore[method-assign]
        server._endpoint._dispatcher._options.hand_over[RELAY] = listening.take  # type: ignore[index]
        with closing(Group(2, {0, 1}, server.address)) as group:
            group.meet()
            assert group.means() == [1.5] * 2
    assert len(seen) > 300_000 * 4
    for value in (1.0, 1.5, 2.0):
        assert bytes(torch.full((8,), value).numpy()) not in seen


# -- the relay alone ---------------------------------------------------------------------------------------------------


@pytest.fixture
def relay() -> Iterator[Relay]:
    with closing(Relay(lambda text: None)) as relay:
        yield relay


def client(relay: Relay, names: bytes) -> socket.socket:
    """A connection that was handed to the relay, with these names sent."""
    own, given = socket.socketpair()
    own.settimeout(20.0)
    relay.take(given)
    own.sendall(names)
    return own


def pair(relay: Relay, meeting: int = 1) -> tuple[socket.socket, socket.socket]:
    first, second = (client(relay, PAIR.pack(meeting, *each)) for each in ((5, 7), (7, 5)))
    assert first.recv(1) == second.recv(1) == GO
    return first, second


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_members_of_different_meetings_and_pairs_are_not_connected(relay: Relay) -> None:
    names = [(1, 5, 7), (2, 7, 5), (1, 7, 6), (1, 8, 5)]
    waiting = [client(relay, PAIR.pack(*each)) for each in names]
    with closing(client(relay, PAIR.pack(2, 5, 7))) as match:
        assert match.recv(1) == waiting[1].recv(1) == GO
    for each in (waiting[0], *waiting[2:]):
        each.settimeout(0.05)
        with pytest.raises(TimeoutError):
            each.recv(1)
    for each in waiting:
        each.close()


def test_a_member_that_dials_again_replaces_its_earlier_connection(relay: Relay) -> None:
    earlier = client(relay, PAIR.pack(1, 5, 7))
    later = client(relay, PAIR.pack(1, 5, 7))
    assert is_closed(earlier)
    other = client(relay, PAIR.pack(1, 7, 5))
    assert later.recv(1) == other.recv(1) == GO
    for each in (earlier, later, other):
        each.close()


def test_bytes_before_the_pairing_close_the_connection(relay: Relay) -> None:
    """Otherwise a waiting worker could fill the memory of the relay."""
    with closing(client(relay, PAIR.pack(1, 5, 7))) as first:
        first.sendall(b"more")
        assert is_closed(first)


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.005)


def test_a_connection_that_ends_while_it_waits_is_forgotten(relay: Relay) -> None:
    first = client(relay, PAIR.pack(1, 5, 7))
    wait_until(lambda: relay._waiting)
    first.close()
    wait_until(lambda: not relay._ends)
    with closing(client(relay, PAIR.pack(1, 7, 5))) as late:
        late.settimeout(0.1)
        with pytest.raises(TimeoutError):
            late.recv(1)


@pytest.mark.parametrize(("limit", "names"), [("ACCEPTED_SECONDS", b"abc"), ("WAITING_SECONDS", PAIR.pack(1, 5, 7))])
def test_a_connection_without_a_peer_is_closed_after_some_time(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, limit: str, names: bytes
) -> None:
    monkeypatch.setattr(module, limit, 0.01)
    with closing(client(relay, names)) as alone:
        assert is_closed(alone)


def test_more_waiting_connections_than_the_limit_close_the_oldest(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    waiting = [client(relay, PAIR.pack(meeting, 5, 7)) for meeting in range(3)]
    assert is_closed(waiting[0])
    for each in waiting:
        each.close()


def test_a_member_that_does_not_read_stops_the_other_one(relay: Relay) -> None:
    """The relay holds BUFFER_BYTES per direction, and TCP or the socket pair the rest."""
    first, second = pair(relay)
    first.settimeout(0.3)
    sent = 0
    with suppress(TimeoutError):
        while sent < 2**24:
            sent += first.send(bytes(2**16))
    assert BUFFER_BYTES <= sent < 2**24
    assert max(len(end.buffer) for end in relay._ends.values()) <= BUFFER_BYTES
    received = 0
    while received < sent:
        received += len(second.recv(2**16))
    first.settimeout(20.0)
    second.sendall(b"still there")
    assert first.recv(100) == b"still there"
    for each in (first, second):
        each.close()


def test_the_end_of_one_direction_is_forwarded_after_its_bytes(relay: Relay) -> None:
    first, second = pair(relay)
    first.sendall(bytes(2**17))
    first.shutdown(socket.SHUT_WR)
    received = bytearray()
    while part := second.recv(2**16):
        received += part
    assert len(received) == 2**17
    second.sendall(b"the other direction is open")
    assert first.recv(100) == b"the other direction is open"
    second.close()
    assert is_closed(first)
    first.close()


def forwards_everything(seed: int, relay: Relay) -> None:
    """Random pairs, sizes, pauses and ends: each member receives the bytes of its peer, in order."""
    rng = random.Random(seed)
    pairs = [pair(relay, meeting=1000 * seed + number) for number in range(rng.randrange(1, 4))]
    streams = [
        (each, other, rng.randbytes(rng.randrange(1, 400_000))) for a, b in pairs for each, other in ((a, b), (b, a))
    ]

    def write(sock: socket.socket, data: bytes, sizes: random.Random) -> None:
        place = 0
        while place < len(data):
            size = sizes.choice([1, 100, 50_000])
            sock.sendall(data[place : place + size])
            place += size
        sock.shutdown(socket.SHUT_WR)

    def read(sock: socket.socket) -> bytes:
        received = bytearray()
        while part := sock.recv(rng.choice([10, 2**12, 2**18])):
            received += part
        return bytes(received)

    with ExitStack() as held, ThreadPoolExecutor(2 * len(streams)) as pool:
        for sock in [sock for both in pairs for sock in both]:
            held.callback(sock.close)
        writers = [pool.submit(write, source, data, random.Random(seed)) for source, _, data in streams]
        readers = [(pool.submit(read, sink), data) for _, sink, data in streams]
        for ticket, data in readers:
            assert ticket.result(60) == data, seed
        for writer in writers:
            writer.result(60)


@pytest.mark.parametrize("block", blocks(10), ids=block_name)
def test_all_bytes_arrive_in_order(relay: Relay, block: range) -> None:
    for seed in block:
        with replayed(seed, "all_bytes_arrive"):
            forwards_everything(seed, relay)


def survives_abrupt_ends(seed: int, relay: Relay) -> None:
    """Connections end at random moments, with unread bytes; a later pair is served."""
    rng = random.Random(seed)
    ends: list[socket.socket] = []
    for _ in range(20):
        names = PAIR.pack(seed, *rng.choice([(5, 7), (7, 5), (5, 8)]))
        ends.append(client(relay, names[: rng.choice([0, 10, PAIR.size, PAIR.size])]))
        with suppress(OSError):
            ends[-1].settimeout(0.001)
            ends[-1].sendall(rng.randbytes(rng.choice([0, 0, 1000, 400_000])))
        for each in rng.sample(ends, rng.randrange(min(len(ends), 3))):
            ends.remove(each)
            each.close()
    first, second = pair(relay, meeting=2**32 + seed)
    first.sendall(b"served")
    assert second.recv(10) == b"served"
    for each in (*ends, first, second):
        each.close()


@pytest.mark.parametrize("block", blocks(20), ids=block_name)
def test_abrupt_ends_do_not_stop_the_relay(relay: Relay, block: range) -> None:
    for seed in block:
        with replayed(seed, "abrupt_ends"):
            survives_abrupt_ends(seed, relay)


def test_the_check_of_forwarding_detects_a_relay_that_changes_a_byte() -> None:
    with closing(Tampering(flip, 1000)) as tampering, pytest.raises(AssertionError):
        forwards_everything(0, tampering)
