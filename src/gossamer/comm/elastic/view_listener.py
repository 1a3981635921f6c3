"""View listener: a worker's listening socket, by which the members of each view connect to each other."""

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

BACKLOG = 1024  # calls of a view that this worker has not heard of yet wait in the kernel

_open: weakref.WeakSet[ViewListener] = weakref.WeakSet()


class ViewListener:
    """A worker's listening socket, open as long as the process. In each view its members connect again through it."""

    def __init__(self, address: str) -> None:
        """address: of this machine, as the others reach it. Raises OSError."""
        listener = socket.create_server((address, 0), family=family_of(address), backlog=BACKLOG)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._greeter = Greeter(listener)
        _open.add(self)

    def meet(
        self, view: View, number: int, token: bytes, seconds: float, over: Callable[[], bool]
    ) -> list[socket.socket | None]:
        """Connections to all members of a view, by rank; None for this one, whose number is `number`.

        Every member must call it. token: the run's, 32 secret bytes; over: whether the view is over, asked now and
        then. Raises MembersUnreached, a ConnectError: `unreached` are the numbers of the members that were not there
        after so many seconds, and nobody's where the view was over before.
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
    """A forked child must not hold the socket open when its parent has ended: callers would wait for an answer."""
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
