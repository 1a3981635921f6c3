"""Dialing all other ranks at once."""

from __future__ import annotations

import socket
import time

from gossamer.comm.environment import listening as module
from gossamer.comm.environment.listening import listening, unreachable


def test_a_peer_that_listens_is_reached_and_who_does_not_is_named(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "MOST_AT_ONCE", 2)
    with socket.socket() as closed, listening("127.0.0.1", callers=4) as port:
        closed.bind(("127.0.0.1", 0))
        dead = closed.getsockname()[1]
        found = unreachable({rank: ("127.0.0.1", dead if rank == 2 else port) for rank in range(5)})
    assert found == {2: "Connection refused"}


def test_a_peer_that_answers_no_packet_is_named_in_time() -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        began = time.monotonic()
        found = unreachable(dict.fromkeys((1, 2, 3), full.getsockname()), seconds=0.2)
        assert time.monotonic() - began < 5
    assert found == dict.fromkeys((1, 2, 3), "Connection timed out")


def test_an_address_without_a_route_is_named() -> None:
    assert set(unreachable({7: ("255.255.255.255", 1)}, seconds=0.2)) == {7}


def test_without_an_address_nobody_listens() -> None:
    with listening(None, callers=2) as port:
        assert port == 0
