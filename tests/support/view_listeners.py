"""Members of views in threads of one process, connected by their view listeners; and intruders, who call them alone."""

from __future__ import annotations

import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from gossamer.comm.elastic.view_listener import ViewListener
from gossamer.comm.handshake import HEADER_BYTES, NONCE_BYTES, PROOF_BYTES, Dialer
from gossamer.comm.membership import Member, View
from gossamer.comm.mesh.greeter import CLAIMS, PURPOSE, meeting_key
from gossamer.errors import ConnectError

TOKEN = bytes(range(32))
CHALLENGE_BYTES, ACCEPT_BYTES = HEADER_BYTES + NONCE_BYTES, HEADER_BYTES + PROOF_BYTES
HELLO_BYTES = HEADER_BYTES + NONCE_BYTES + PROOF_BYTES + CLAIMS.size


def never():
    return False


class ListenerGroup:
    """Members in threads of one process."""

    def __init__(self, count):
        self.pool = ThreadPoolExecutor(count + 1)
        self.listeners = {1000 + each: ViewListener("127.0.0.1") for each in range(count)}
        self.open = []

    def view(self, number, places, secret=None):
        members = tuple(
            Member(number=1000 + each, host="127.0.0.1", port=self.listeners[1000 + each].address[1]) for each in places
        )
        return View(number=number, members=members, newcomers=frozenset(), secret=secret or secrets.token_bytes(32))

    def meeting(self, view, place, token=TOKEN, seconds=10.0, over=never):
        """A ticket for what a member comes to."""
        number = view.members[place].number
        return self.pool.submit(self.listeners[number].meet, view, number, token, seconds, over)

    def meet(self, view):
        return self.both(*[self.meeting(view, place) for place in range(view.world)])

    def both(self, *tickets):
        found = [ticket.result(20) for ticket in tickets]
        self.open += [each for end in found for each in end if each is not None]
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (*self.open, *self.listeners.values()):
            each.close()
        self.pool.shutdown()


def check_connected(ends):
    """Every pair is connected with each other, and not with anybody else."""
    for rank, end in enumerate(ends):
        assert [each is None for each in end] == [peer == rank for peer in range(len(ends))]
        for peer, each in enumerate(end):
            if each is not None:
                each.setblocking(True)
                each.settimeout(5)
                each.sendall(bytes([rank, peer]))
    for rank, end in enumerate(ends):
        assert all(each is None or each.recv(2) == bytes([peer, rank]) for peer, each in enumerate(end))


class Intruder:
    """Calls a listener by itself."""

    open: ClassVar = []

    def __init__(self, listener):
        self.connection = socket.create_connection(listener.address, 5)
        self.open.append(self.connection)

    def challenge(self):
        return self.connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)

    def say(self, data):
        self.connection.sendall(data)
        return self.answer()

    def answer(self):
        """Empty where it was hung up on."""
        try:
            return self.connection.recv(ACCEPT_BYTES, socket.MSG_WAITALL)
        except ConnectionError:
            return b""


def dialer(view, challenge, token=TOKEN, caller=1001, called=1000):
    """Member 1001, which has received a challenge of member 1000."""
    key = meeting_key(token, view.number.to_bytes(8, "big") + view.secret)
    end = Dialer(PURPOSE, key, CLAIMS.pack(view.number, caller, called))
    end.receive(challenge)
    return end


def hello(view, challenge, **changes):
    """What member 1001 says to member 1000."""
    return dialer(view, challenge, **changes).output()


def answer_of_listener(says):
    """What member 1000 answers in a view with 1001 and 1002, to whom says(view, challenge) gives what is said."""
    with ListenerGroup(3) as group:
        view = group.view(5, (0, 1, 2))
        ticket = group.meeting(view, 0, seconds=20.0, over=(over := threading.Event()).is_set)
        intruder = Intruder(group.listeners[1000])
        answer = intruder.say(says(view, intruder.challenge()))
        over.set()
        with pytest.raises(ConnectError):
            ticket.result(10)
        return answer
