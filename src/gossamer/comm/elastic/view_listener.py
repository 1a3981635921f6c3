"""View listener: a worker's listening socket, through which the members of each view connect to each other."""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections.abc import Callable
from functools import partial

from gossamer.comm.membership import View
from gossamer.comm.mesh.connect import family_of, settle
from gossamer.comm.mesh.greeter import Greeter, MeshMeeting, dial, meeting_key

BACKLOG = 1024  # connections for a view that this worker does not know yet wait in the kernel

_open: weakref.WeakSet[ViewListener] = weakref.WeakSet()


class ViewListener:
    """A worker's listening socket, open for the life of the process. The members of each view connect through it."""

    def __init__(self, address: str) -> None:
        """address: local address as the other workers reach it. Raises OSError."""
        listener = socket.create_server((address, 0), family=family_of(address), backlog=BACKLOG)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._greeter = Greeter(listener)
        _open.add(self)

    def meet(
        self, view: View, number: int, token: bytes, seconds: float, over: Callable[[], bool]
    ) -> list[socket.socket | None]:
        """Connect to all members of a view. Every member must call it.

        Args:
            view: The view.
            number: This member's number.
            token: The run's token, 32 secret bytes.
            seconds: Time limit.
            over: Whether the view has ended; called repeatedly.

        Returns:
            Sockets by rank; None for this member.

        Raises:
            MembersUnreached: Some members could not be connected in time; `unreached` has their numbers, or is empty
                if the view has ended.
        """
        rank = view.rank_of(number)
        others = {each.number: each for each in view.members if each.number != number}
        meeting = MeshMeeting(
            number=view.number,
            key=meeting_key(token, struct.pack("!Q", view.number) + view.secret),
            me=number,
            names={each.number: f"rank {view.rank_of(each.number)} at {each.host}" for each in others.values()},
            calls={each.number: partial(dial, each.host, each.port) for each in view.members[:rank]},
        )
        found = self._greeter.meet(meeting, seconds, over)
        for connection in found.values():
            settle(connection)
        return [found.get(each.number) for each in view.members]

    def close(self) -> None:
        self._greeter.close()


def _close_in_child() -> None:
    """Close the socket in a forked child. Otherwise connections would still be accepted after the parent has ended."""

    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
