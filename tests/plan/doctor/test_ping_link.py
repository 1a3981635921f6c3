from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from gossamer.comm.environment import JobEnvironment
from gossamer.plan.doctor.ping_link import PingLink, PingListener, call
from gossamer.plan.doctor.worker import describe

TOKEN = b"sixteen letters!"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture
def door() -> Iterator[PingListener]:
    with closing(PingListener("127.0.0.1", TOKEN)) as door:
        yield door


@pytest.fixture
def link(door: PingListener) -> Iterator[PingLink]:
    """The asking end; the other one serves until it is told to end or the link breaks."""

    def serve() -> None:
        with door.open(5) as other:
            other.serve()
        served.set()

    served = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    with call("127.0.0.1", door.port, TOKEN, 5) as asking:
        yield asking
        asking.end()
        thread.join(5)
    assert served.is_set()


def test_one_end_asks_and_the_other_answers(link: PingLink) -> None:
    ping = link.ping()
    assert 0 < ping.seconds < 5
    assert ping.answered == pytest.approx(ping.sent, abs=5)
    assert link.push(3_000_001) > 0
    assert link.fetch(3_000_001) > 0
    assert link.fetch(1) > 0
    assert 0 < link.ping().seconds < 5  # nothing of a message is left over


def test_only_who_knows_the_token_is_let_in(door: PingListener) -> None:
    stranger = call("127.0.0.1", door.port, TOKEN.swapcase(), 5)
    silent = socket.create_connection(("127.0.0.1", door.port), 5)
    silent.close()
    with stranger, call("127.0.0.1", door.port, TOKEN, 5) as friend:
        with door.open(5) as answering:
            thread = threading.Thread(target=answering.serve)
            thread.start()
            assert friend.ping().seconds > 0
            friend.end()
            thread.join(5)
        with pytest.raises(OSError, match=r"closed|reset"):
            stranger.ping()


def test_nobody_comes(door: PingListener) -> None:
    with pytest.raises(TimeoutError):
        door.open(0.01)


def test_a_closed_door_is_an_error_at_once() -> None:
    with closing(PingListener("127.0.0.1", TOKEN)) as closed:
        port = closed.port
    with pytest.raises(ConnectionRefusedError):
        call("127.0.0.1", port, TOKEN, 5)


def test_an_end_that_closes_is_noticed(door: PingListener) -> None:
    asking = call("127.0.0.1", door.port, TOKEN, 5)
    with door.open(5) as answering:
        with asking:
            pass
        with pytest.raises(ConnectionError, match="closed the connection"):
            answering.serve()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_two_ranks_meet_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "only6")  # an interface without an IPv4 address
    own = describe(JobEnvironment(world=2, master_address="::1"))
    assert (own.address, own.interface) == ("::1", "only6")
    with closing(PingListener(own.address, TOKEN)) as door, ThreadPoolExecutor() as pool:
        answering = pool.submit(door.open, 5)
        with call(own.address, door.port, TOKEN, 5) as asking, answering.result(5) as other:
            serving = pool.submit(other.serve)
            assert asking.ping().seconds > 0
            asking.end()
            serving.result(5)
