"""The meeting's thread in rank 0, before strangers: they are ignored, and the ranks still meet."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from support.joining import in_threads

from gossamer import events
from gossamer.comm.environment import meeting_server
from gossamer.comm.environment.meeting import COMING, REACHING, STANDING, Hello, RunIdentity
from gossamer.comm.environment.meeting_member import Failed, Foreign, MeetingMember, Refused, attend
from gossamer.comm.environment.meeting_server import MeetingServer, StrangerWarnings
from gossamer.comm.handshake import Listener

OURS = RunIdentity(run="a run", world=2, token=bytes(range(32)))


@pytest.fixture
def notices() -> Iterator[list[str]]:
    said: list[str] = []
    end = events.subscribe(lambda event: said.append(event.message) if isinstance(event, events.Noticed) else None)
    yield said
    end()


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    at = listener.getsockname()
    with contextlib.closing(MeetingServer(listener, OURS)):
        yield at


def come(address: tuple[str, int], rank: int, identity: RunIdentity = OURS, world: int = 2) -> MeetingMember:
    hello = Hello(run=identity.run, world=world, rank=rank, who=f"w{rank}")
    return attend(lambda: address, identity, hello, 5.0)


def check_two_meet(address: tuple[str, int]) -> None:
    with contextlib.closing(come(address, 0)) as first, contextlib.closing(come(address, 1)) as second:
        both: list[list[str]] = []

        def talk(member: MeetingMember, text: str) -> None:
            member.everyone(COMING, 5.0)
            both.append(member.everyone(REACHING, 5.0, text))
            member.everyone(STANDING, 5.0, "")

        threads = [threading.Thread(target=talk, args=each) for each in ((first, "0"), (second, "1"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert both == [["0", "1"]] * 2


def test_garbage_is_ignored_with_one_warning_and_the_ranks_meet(address: tuple[str, int], notices: list[str]) -> None:
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 5000,
        b"GSM1\xff\xff\xff\xff",
        b"GSMR\x03\x02\0\0\xff\xff\xff\xff",
    ) * 3:
        with socket.create_connection(address) as stranger:
            stranger.sendall(sent)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(1000):
                    pass
    check_two_meet(address)
    (said,) = notices
    assert "a connection from 127.0.0.1 to the workers' meeting was ignored" in said


def test_silent_connections_without_end_keep_nobody_out(
    address: tuple[str, int], notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(3 * (meeting_server.SPARE_STRANGERS + 2)):
            silent.enter_context(socket.create_connection(address))
        check_two_meet(address)
    assert len(notices) == 1


def test_who_says_nothing_is_closed_in_time(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_server, "STRANGER_SECONDS", 0.05)
    with socket.create_connection(address) as silent:
        silent.settimeout(5)
        while silent.recv(1000):
            pass


def test_who_lacks_the_token_is_refused_at_both_ends_and_the_real_one_takes_its_place(
    address: tuple[str, int], notices: list[str]
) -> None:
    with pytest.raises(Refused, match="cannot prove that it belongs to this run"):
        come(address, 1, RunIdentity(run="a run", world=2))
    with pytest.raises(Refused, match="belongs to the run 'older' and this is the run 'a run'"):
        come(address, 1, RunIdentity(run="older", world=2, token=OURS.token))
    assert len(notices) == 1
    check_two_meet(address)


def test_a_meeting_without_the_token_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts everybody, by another key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        impostor = MeetingServer(listener, RunIdentity(run="a run", world=2))
        impostor._meeting._objection = lambda hello, proven: None  # type: ignore[method-assign]
        monkeypatch.setattr(Listener, "is_proven", lambda listener, key: True)
        with contextlib.closing(impostor), pytest.raises(Foreign, match="cannot prove that it belongs to this run"):
            come(listener.getsockname(), 1)


def test_the_end_of_a_rank_is_heard_at_once(address: tuple[str, int]) -> None:
    with contextlib.closing(come(address, 0)) as first:
        come(address, 1).close()
        with pytest.raises(Failed, match=r"rank 1 \(w1\) left"):
            first.everyone(REACHING, 5.0, "")


def test_the_end_of_rank_0_is_heard_at_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = MeetingServer(listener, OURS)
    with contextlib.closing(come(listener.getsockname(), 1)) as member:
        server.close()
        with pytest.raises(Failed, match="rank 0, which hosts the meeting, left") as failed:
            member.everyone(COMING, 5.0)
    assert failed.value.left


def test_a_peer_that_leaves_later_is_heard_of_by_those_that_ask(address: tuple[str, int]) -> None:
    with contextlib.closing(come(address, 0)) as first, contextlib.closing(come(address, 1)) as second:
        in_threads(*(lambda each=each: each.everyone(STANDING, 5.0, "") for each in (first, second)))
        assert first.gone == ""
        second.close()
        while not first.gone:
            first.watch(5.0)
    assert first.gone == "rank 1 (w1)"


def test_the_end_of_rank_0_is_heard_of_later_too() -> None:
    server = MeetingServer(listener := socket.create_server(("127.0.0.1", 0)), RunIdentity(run="a run", world=1))
    with contextlib.closing(come(listener.getsockname(), 0, RunIdentity(run="a run", world=1), world=1)) as member:
        member.everyone(STANDING, 5.0, "")
        assert member.gone == ""
        server.close()
        assert member.gone == "rank 0"


def test_warnings_of_one_kind_come_once_in_a_while(notices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(meeting_server.time, "monotonic", lambda: now)
    warn = StrangerWarnings()
    for _ in range(3):
        warn("ignored", "a")
    warn("refused", "b")
    now += meeting_server.QUIET_SECONDS
    warn("ignored", "c")
    assert notices == ["a.", "b.", "c (2 more before)."]
