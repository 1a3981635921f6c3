"""Greeters of two members, of which the caller cannot dial the other one's listening address."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from gossamer.base import system
from gossamer.comm.handshake import Listener
from gossamer.comm.mesh import connection_candidates
from gossamer.comm.mesh.connection_candidates import MOST_KNOCKS, Approach
from gossamer.comm.mesh.greeter import CLAIMS, PURPOSE, Dial, Greeter, MembersUnreached, MeshMeeting, dial

LOOPBACK, KEY = "127.0.0.1", bytes(range(32))
CALLER, CALLED = 8, 7


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection_candidates.BEGIN_SECONDS, Approach.PUNCHED, 0.0)


@pytest.fixture
def greeters() -> Iterator[dict[int, Greeter]]:
    found = {}
    for number in (CALLER, CALLED):
        listener = socket.socket()
        system.share_port(listener)
        listener.bind((LOOPBACK, 0))
        listener.listen()
        found[number] = Greeter(listener)
    yield found
    for each in found.values():
        each.close()


def unreachable() -> socket.socket:
    raise ConnectionRefusedError("closed")


def address(greeter: Greeter) -> tuple[str, int]:
    host, port = greeter.listeners[0].getsockname()
    return host, port


def punch(greeters: Mapping[int, Greeter], number: int) -> Dial:
    """Dial the other member from the own listening port."""
    return partial(dial, *address(greeters[CALLER + CALLED - number]), address(greeters[number]))


def meeting(number: int, punches: Sequence[Dial], key: bytes = KEY, view: int = 1) -> MeshMeeting:
    other = CALLER + CALLED - number
    calls = {CALLED: unreachable} if number == CALLER else {}
    return MeshMeeting(number=view, key=key, me=number, names={other: "other"}, calls=calls, punches={other: punches})


def meet(
    greeters: Mapping[int, Greeter], *meetings: MeshMeeting, seconds: float = 30.0
) -> list[socket.socket | MembersUnreached]:
    def one(each: MeshMeeting) -> socket.socket | MembersUnreached:
        try:
            return next(iter(greeters[each.me].meet(each, seconds).values()))
        except MembersUnreached as error:
            return error

    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(one, meetings))


def check_connected(first: object, second: object) -> None:
    assert isinstance(first, socket.socket), first
    assert isinstance(second, socket.socket), second
    for one, other in ((first, second), (second, first)):
        one.setblocking(True)
        other.settimeout(10.0)
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    first.close()
    second.close()


@pytest.mark.parametrize("punching", [(CALLED,), (CALLER,), (CALLER, CALLED)])
def test_members_are_connected_by_whichever_end_opens_the_connection(
    greeters: Mapping[int, Greeter], punching: tuple[int, ...]
) -> None:
    for view in range(1, 11):  # always from the same ports
        each = [
            meeting(number, [punch(greeters, number)] if number in punching else [], view=view)
            for number in (CALLER, CALLED)
        ]
        check_connected(*meet(greeters, *each))


def test_ends_that_open_one_connection_at_the_same_time_are_connected(greeters: Mapping[int, Greeter]) -> None:
    """Neither greeter accepts this connection."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    meetings = [meeting(number, [Opened(end).take]) for number, end in ((CALLER, first), (CALLED, second))]
    check_connected(*meet(greeters, *meetings))


class Opened:
    """Opens an existing connection once."""

    def __init__(self, end: socket.socket) -> None:
        self._end: socket.socket | None = end

    def take(self) -> socket.socket:
        end, self._end = self._end, None
        if end is None:
            raise ConnectionRefusedError("closed")
        return end


def test_a_peer_of_another_run_is_not_connected(greeters: Mapping[int, Greeter]) -> None:
    other_run = meeting(CALLED, [punch(greeters, CALLED)], key=bytes(32))
    found = meet(greeters, meeting(CALLER, []), other_run, seconds=0.5)
    assert all(isinstance(each, MembersUnreached) for each in found)


def test_strangers_that_knock_do_not_prevent_the_meeting(
    greeters: Mapping[int, Greeter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know the numbers of the meeting and of the member, but not its key. They take all places, and are silent."""
    monkeypatch.setattr(connection_candidates, "PROOF_SECONDS", 0.2)
    claims = CLAIMS.pack(1, CALLED, CALLER)
    strangers = [socket.create_connection(address(greeters[CALLER])) for _ in range(MOST_KNOCKS + 2)]
    for each in strangers:
        each.sendall(Listener(PURPOSE, knock=claims).output())
    try:
        found = meet(greeters, meeting(CALLER, [punch(greeters, CALLER)]), meeting(CALLED, []))
        check_connected(*found)
    finally:
        for each in strangers:
            each.close()


@pytest.mark.parametrize("claims", [b"", bytes(24), CLAIMS.pack(2, CALLED, CALLER), CLAIMS.pack(1, 9, CALLER)])
def test_a_knock_of_another_meeting_or_member_is_closed(greeters: Mapping[int, Greeter], claims: bytes) -> None:
    with socket.create_connection(address(greeters[CALLER])) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.settimeout(10.0)
        stranger.sendall(Listener(PURPOSE, knock=claims).output())
        ticket = pool.submit(meet, greeters, meeting(CALLER, []), seconds=1.0)
        received = b""
        try:
            while part := stranger.recv(100):
                received += part
        except ConnectionError:
            pass
        assert len(received) <= 44  # no more than a challenge
        assert isinstance(ticket.result()[0], MembersUnreached)
