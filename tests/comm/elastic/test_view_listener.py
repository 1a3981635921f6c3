"""View listeners: connect the members of each view, and name a member that does not come."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing

import pytest
from support.view_listeners import TOKEN, ListenerGroup, check_connected

from gossamer.base.system import share_port
from gossamer.comm.elastic.view_listener import ViewListener, _listen
from gossamer.comm.mesh import greeter as greeting_loop
from gossamer.errors import ConnectError


def test_views_shrink_and_grow_over_the_same_listeners():
    with ListenerGroup(4) as group:
        for number, places in enumerate([(0, 1, 2, 3), (0, 1, 3), (0, 1, 3, 2), (2,)]):
            check_connected(group.meet(group.view(number, places)))


def test_connections_of_different_pairs_are_found_out():
    """The twin of the check above."""
    with ListenerGroup(3) as group:
        ends = group.meet(group.view(1, (0, 1, 2)))
        ends[0][1], ends[0][2] = ends[0][2], ends[0][1]
        with pytest.raises(AssertionError):
            check_connected(ends)


def test_promise_6_connections_are_without_delay_and_notice_machines_that_are_gone():
    with ListenerGroup(2) as group:
        for rank, end in enumerate(group.meet(group.view(1, (0, 1)))):
            assert end[1 - rank].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert end[1 - rank].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert not end[1 - rank].getblocking()


@pytest.mark.parametrize("late", [0, 1])
def test_a_peer_that_comes_first_waits_for_the_other(late):
    with ListenerGroup(2) as group:
        view = group.view(1, (0, 1))
        first = group.meeting(view, 1 - late)
        second = group.meeting(view, late)
        check_connected(group.both(*((second, first) if late == 0 else (first, second))))


def test_a_peer_that_does_not_come_is_named_and_the_rest_is_hung_up():
    with ListenerGroup(3) as group:
        group.listeners[1000].close()
        view = group.view(1, (0, 1, 2))
        for ticket in [group.meeting(view, place, seconds=0.3) for place in (1, 2)]:
            with pytest.raises(ConnectError, match=r"rank 0 at 127\.0\.0\.1 \(Connection refused\)") as caught:
                ticket.result(10)
            assert 1000 in caught.value.unreached


def test_no_rank_is_named_where_the_view_was_over_before():
    with ListenerGroup(2) as group:
        over = threading.Event()
        ticket = group.meeting(group.view(7, (0, 1)), 0, seconds=60.0, over=over.is_set)
        over.set()
        with pytest.raises(ConnectError, match="meeting 7 ended") as caught:
            ticket.result(10)
        assert caught.value.unreached == ()


@pytest.mark.parametrize("what", ["token", "secret", "view"])
def test_a_peer_that_does_not_know_all_is_not_connected(what):
    """One of two members holds another token, another secret, or means another view."""
    with ListenerGroup(2) as group:
        view = group.view(2, (0, 1))
        other = group.view(1 if what == "view" else 2, (0, 1), view.secret if what != "secret" else None)
        tokens = TOKEN, TOKEN[::-1] if what == "token" else TOKEN
        tickets = [group.meeting(each, place, tokens[place], seconds=0.5) for place, each in enumerate((view, other))]
        for place, ticket in enumerate(tickets):
            with pytest.raises(ConnectError) as caught:
                ticket.result(10)
            assert caught.value.unreached == (1001 - place,)


def test_a_call_to_a_machine_that_drops_packets_ends_in_time(monkeypatch):
    """Nothing ever becomes of the connection."""
    with ListenerGroup(2) as group:
        view = group.view(1, (0, 1))
        pending = []

        def lost(host, port, source=None):
            pending.append(socket.socket())
            return pending[-1]

        monkeypatch.setattr("gossamer.comm.elastic.view_listener.dial", lost)
        monkeypatch.setattr(greeting_loop, "DIAL_SECONDS", 0.05)
        began = time.monotonic()
        with pytest.raises(ConnectError, match="rank 0"):
            group.meeting(view, 1, seconds=0.4).result(10)
        assert time.monotonic() - began < 5


def test_two_workers_never_listen_at_the_same_port():
    with closing(ViewListener("127.0.0.1")) as first:
        for listening in first._greeter.listeners:
            with pytest.raises(OSError, match="in use"):
                _listen(*listening.getsockname())
            with socket.socket() as dialing:
                share_port(dialing)
                dialing.bind(listening.getsockname())


def test_a_forked_child_does_not_hold_the_door_open():
    with ListenerGroup(2) as group:
        if (child := os.fork()) == 0:
            os._exit(0 if group.listeners[1000]._greeter.listeners[0].fileno() == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check_connected(group.meet(group.view(1, (0, 1))))
