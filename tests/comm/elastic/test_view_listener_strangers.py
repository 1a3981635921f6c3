"""Strangers at a listener: nobody but members is connected, whatever is said, repeated or left out."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress

import pytest
from support.view_listeners import (
    ACCEPT_BYTES,
    HELLO_BYTES,
    TOKEN,
    Intruder,
    ListenerGroup,
    answer_of_listener,
    check_connected,
    dialer,
    hello,
)

from gossamer.comm.membership import Member, View
from gossamer.comm.mesh import greeter as greeting_loop
from gossamer.errors import ConnectError


@pytest.fixture(autouse=True)
def _intruders_hang_up():
    yield
    while Intruder.open:
        Intruder.open.pop().close()


def test_a_member_is_answered():
    """The twin of all refusals below: what they change is what is refused."""
    heard = {}

    def says(view, challenge):
        heard["dialer"] = dialer(view, challenge)
        return heard["dialer"].output()

    answer = answer_of_listener(says)
    heard["dialer"].receive(answer)
    assert heard["dialer"].accepted is not None


@pytest.mark.parametrize(
    "says",
    [
        lambda view, challenge: hello(view, challenge[:-32] + bytes(32)),  # recorded under another challenge
        lambda view, challenge: hello(view, challenge, token=TOKEN[::-1]),
        lambda view, challenge: hello(view, challenge, caller=1000),  # itself
        lambda view, challenge: hello(view, challenge, caller=1003),  # no member
        lambda view, challenge: hello(view, challenge, called=1002),  # meant for another listener
        lambda view, challenge: challenge * 4,
        lambda view, challenge: b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"x" * 200,
    ],
)
def test_promise_15_who_proves_nothing_is_hung_up_on(says):
    assert answer_of_listener(says) == b""


def test_a_hello_of_an_older_view_is_hung_up_on():
    def says(view, challenge):
        older = View(number=4, members=view.members, newcomers=frozenset(), secret=view.secret)
        return hello(older, challenge)

    assert answer_of_listener(says) == b""


def test_a_recorded_greeting_proves_nothing_to_its_caller_either():
    """Somebody listens at member 1000's address and repeats what it said to member 1001 before."""
    with ListenerGroup(2) as group, socket.create_server(("127.0.0.1", 0)) as listener:
        real = group.view(3, (0, 1))
        members = (Member(number=1000, host="127.0.0.1", port=listener.getsockname()[1]), real.members[1])
        view = View(number=3, members=members, newcomers=frozenset(), secret=real.secret)
        recorded = {}

        def relay():
            """Between the two, once; and then alone."""
            caller, _ = listener.accept()
            intruder = Intruder(group.listeners[1000])
            recorded["challenge"] = intruder.challenge()
            caller.sendall(recorded["challenge"])
            recorded["answer"] = intruder.say(caller.recv(HELLO_BYTES, socket.MSG_WAITALL))
            caller.sendall(recorded["answer"])
            again, _ = listener.accept()
            again.sendall(recorded["challenge"])
            again.recv(HELLO_BYTES, socket.MSG_WAITALL)
            again.sendall(recorded["answer"])
            caller.close()
            again.close()

        relaying = group.pool.submit(relay)
        tickets = group.meeting(real, 0), group.meeting(view, 1)
        group.open += [ticket.result(10)[1 - place] for place, ticket in enumerate(tickets)]
        with pytest.raises(ConnectError, match="failed authentication"):
            group.meeting(view, 1, seconds=0.5).result(10)
        relaying.result(10)


def test_calls_for_a_later_view_are_kept_until_it_is_known():
    with ListenerGroup(3) as group:
        now, later = group.view(1, (0, 2)), group.view(2, (0, 1))
        first, kept = group.listeners[1000], threading.Event()
        park = first._greeter.park
        first._greeter.park = lambda caller: (park(caller), kept.set())
        here = group.meeting(now, 0)
        early = group.meeting(later, 1)
        assert kept.wait(10)
        assert not early.done()
        check_connected(group.both(here, group.meeting(now, 1)))
        check_connected(group.both(group.meeting(later, 0), early))
        assert not first._greeter.parked


def test_no_more_are_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(greeting_loop, "MOST_PARKED", 3)
    with ListenerGroup(2) as group:
        view = group.view(1, (0, 1))
        ticket = group.meeting(view, 0)
        intruders = [Intruder(group.listeners[1000]) for _ in range(5)]
        for each in intruders:
            later = View(number=9, members=view.members, newcomers=frozenset(), secret=bytes(32))
            each.connection.sendall(hello(later, each.challenge()))
        assert [each.answer() for each in intruders[:2]] == [b"", b""]
        check_connected(group.both(ticket, group.meeting(view, 1)))
        assert len(group.listeners[1000]._greeter.parked) == 3


def test_silent_strangers_disturb_nobody_and_are_hung_up_on(monkeypatch):
    monkeypatch.setattr(greeting_loop, "STRANGER_SECONDS", 0.1)
    monkeypatch.setattr(greeting_loop, "MOST_VISITS", 4)
    with ListenerGroup(2) as group:
        view = group.view(1, (0, 1))
        strangers = [Intruder(group.listeners[1000]) for _ in range(9)]
        strangers[0].connection.sendall(b"x" * 40)  # and no more
        ticket = group.meeting(view, 0)
        for each in strangers:
            each.challenge()
            assert each.answer() == b""
        check_connected(group.both(ticket, group.meeting(view, 1)))


def test_a_call_that_was_given_up_halfway_is_made_again():
    """Who listens takes the first call and hangs up, as a listener does that is closed amid a meeting."""
    with ListenerGroup(2) as group, socket.create_server(("127.0.0.1", 0)) as listener:
        real = group.view(3, (0, 1))
        members = (Member(number=1000, host="127.0.0.1", port=listener.getsockname()[1]), real.members[1])
        ticket = group.meeting(View(number=3, members=members, newcomers=frozenset(), secret=real.secret), 1)
        first, _ = listener.accept()
        first.close()
        second, _ = listener.accept()
        intruder = Intruder(group.listeners[1000])
        other = group.meeting(real, 0)
        second.sendall(intruder.challenge())
        second.sendall(intruder.say(second.recv(HELLO_BYTES, socket.MSG_WAITALL)))
        group.open += [ticket.result(10)[0], other.result(10)[1], second]


def test_a_member_that_calls_twice_has_given_up_the_first_call():
    with ListenerGroup(3) as group:
        view = group.view(5, (0, 1, 2))
        ticket = group.meeting(view, 0)
        calls = [Intruder(group.listeners[1000]) for _ in range(2)]
        for each in calls:
            assert len(each.say(hello(view, each.challenge()))) == ACCEPT_BYTES
        assert calls[0].answer() == b""
        last = Intruder(group.listeners[1000])
        last.say(hello(view, last.challenge(), caller=1002))
        ends = ticket.result(10)
        calls[1].connection.sendall(b"hello")
        ends[1].setblocking(True)
        assert ends[1].recv(5, socket.MSG_WAITALL) == b"hello"
        group.open += filter(None, ends)


def test_noise_of_any_length_is_hung_up_on_while_members_meet():
    source = random.Random(11)
    with ListenerGroup(2) as group:
        view = group.view(1, (0, 1))
        ticket = group.meeting(view, 0)
        for _ in range(60):
            noisy = Intruder(group.listeners[1000])
            noise = source.randbytes(source.randrange(1, 2 * HELLO_BYTES))
            noisy.connection.sendall(b"GSMR\x03\x02\0\0" + noise if source.random() < 0.5 else noise)
            with suppress(OSError):  # it was hung up on before
                noisy.connection.shutdown(socket.SHUT_WR)
            while noisy.answer():
                pass
        check_connected(group.both(ticket, group.meeting(view, 1)))
