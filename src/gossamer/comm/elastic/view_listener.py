"""View listener: a worker's listening socket, through which the members of each view connect to each other."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from gossamer.base import system
from gossamer.base.host_port import Address, family_of, is_loopback
from gossamer.comm.membership import Member, View
from gossamer.comm.mesh.connect import settle
from gossamer.comm.mesh.greeter import NO_EXCHANGE, Detour, Dial, Greeter, MeshMeeting, dial, meeting_key
from gossamer.comm.mesh.key_exchange import LinkKeyExchange
from gossamer.comm.mesh.sealing import LinkKeys

BACKLOG = 1024  # connections for a view that this worker does not know yet wait in the kernel

_open: weakref.WeakSet[ViewListener] = weakref.WeakSet()


class ViewListener:
    """A worker's listening sockets, open for the life of the process. The members of each view connect through them.

    When newcomers are admitted, the members have two connections to each other for a moment. Connections from listening
    ports (hole punching) therefore leave from the port, or from the one after it, and lead to the same one of the other
    member. A router is assumed to keep the distance of the two ports.
    """

    def __init__(self, address: str, *others: str) -> None:
        """address, others: local addresses as the other workers reach them. Raises OSError if the first is unusable."""
        listeners = [_listen_twice(address)]
        for each in others:
            with suppress(OSError):  # it was removed since it was listed
                listeners.append(_listen_twice(each))
        self.addresses: tuple[Address, ...] = tuple(first.getsockname()[:2] for first, _ in listeners)
        self._greeter = Greeter(*(each for pair in listeners for each in pair))
        self._meeting = threading.Lock()  # of two threads, the second waits until the first meeting is over
        _open.add(self)

    @property
    def address(self) -> Address:
        return self.addresses[0]

    def address_towards(self, host: str) -> Address | None:
        """Own listening address from which `host` can be dialed through routers; None if unnecessary or impossible."""
        family = family_of(host)
        found = (each for each in self.addresses if family_of(each[0]) == family and not is_loopback(each[0]))
        return None if is_loopback(host) or not hasattr(socket, "SO_REUSEPORT") else next(found, None)

    def meet(
        self,
        view: View,
        number: int,
        token: bytes,
        seconds: float,
        over: Callable[[], bool],
        detours: Sequence[Callable[[int, int, int], Detour]] = (),
        keys: dict[int, LinkKeys] | None = None,
        relayed: dict[int, int] | None = None,
    ) -> list[socket.socket | None]:
        """Connect to all members of a view. Every member must call it.

        Args:
            view: The view.
            number: This member's number.
            token: The run's token, 32 secret bytes.
            seconds: Time limit.
            over: Whether the view has ended; called repeatedly.
            detours: Each dials a relay of the run, see relay.detour.
            keys: Receives the keys of each connection, by rank; None for connections that are not sealed. Equal at all
                members.
            relayed: Receives the number of the relay's peer of each relayed connection, by rank.

        Returns:
            Sockets by rank; None for this member.

        Raises:
            MembersUnreached: Some members could not be connected in time; `unreached` has their numbers, or is empty
                if the view has ended.
        """
        rank = view.rank_of(number)
        others = {each.number: each for each in view.members if each.number != number}
        context = struct.pack("!Q", view.number) + view.secret
        exchange = NO_EXCHANGE if keys is None else LinkKeyExchange(rank, context, keys, view.rank_of)
        meeting = MeshMeeting(
            number=view.number,
            key=meeting_key(token, context),
            me=number,
            names={each.number: f"rank {view.rank_of(each.number)} at {each.host}" for each in others.values()},
            calls={each.number: partial(dial, each.host, each.port) for each in view.members[:rank]},
            punches={each.number: self._punches(each, view.number % 2) for each in others.values()},
            detours=detours,
            exchange=exchange,
        )
        with self._meeting:
            found = self._greeter.meet(meeting, seconds, over)
        for connection in found.values():
            settle(connection)
        if relayed is not None:
            relayed.update({view.rank_of(each): relay for each, relay in meeting.relayed.items()})
        return [found.get(each.number) for each in view.members]

    def _punches(self, member: Member, offset: int) -> Sequence[Dial]:
        """Dials to all addresses of a member from the own listening port. offset: added to the ports of both ends."""
        found = [(self.address_towards(host), host, port) for host, port in member.addresses]
        return [
            partial(dial, host, port + offset, (source[0], source[1] + offset))
            for source, host, port in found
            if source is not None and port + offset < 2**16
        ]

    def close(self) -> None:
        self._greeter.close()


def _listen_twice(address: str) -> tuple[socket.socket, socket.socket]:
    """Listen at any free port and at the next one."""
    while True:
        first = _listen(address, 0)
        try:
            return first, _listen(address, first.getsockname()[1] + 1)
        except OverflowError:
            first.close()
        except OSError as problem:
            first.close()
            if problem.errno != errno.EADDRINUSE:
                raise


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        system.reuse_address(listener)
        listener.bind((address, port))
        listener.listen(BACKLOG)
        if hasattr(socket, "SO_REUSEPORT"):
            system.share_port(listener)  # not before, because another worker's listener would share it, too
    except OSError:
        listener.close()
        raise
    return listener


def _close_in_child() -> None:
    """Close the socket in a forked child. Otherwise connections would still be accepted after the parent has ended."""

    for each in list(_open):
        each.close()


system.after_fork_in_child(_close_in_child)
