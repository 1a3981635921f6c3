"""Every worker connected to every other, and programs of messages that run over these connections.

The loops are compiled (kernels-src/mesh.hpp). A message leaves at once, whether its receiver waits for it or not; a
peer that ends is noticed at once, and one that says another word is named.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

from gossamer.errors import MismatchError, PeerLost
from gossamer.kernels.native import Count, Function, Pointer, library
from gossamer.transports.programs import Program

FINISHED, NOT_YET, GONE, MISMATCH = 0, 1, -11, -12  # Ending in kernels-src/mesh.hpp
PATIENCE_MILLISECONDS = 500  # after which whoever closes has a turn

_OPEN = Function("gossamer_mesh_open", Count, Pointer, Count)
_CLOSE = Function("gossamer_mesh_close", Pointer)
_BEGIN = Function(
    "gossamer_mesh_begin", Pointer, Pointer, Count, Pointer, Pointer, Count, Count, ctypes.c_double, Count
)
_WAIT = Function("gossamer_mesh_wait", Pointer, Count, Count, Pointer, Pointer)

_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def available() -> bool:
    """Whether the compiled loops are there."""
    return library() is not None


class Mesh:
    """One rank's end of all connections. Words come from one thread at a time, in the same order on every rank.

    Any thread may close it; whoever waits then has a PeerLost.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None]) -> None:
        self.rank, self.world = rank, len(sockets)
        self._sockets = sockets
        numbers = (ctypes.c_int32 * len(sockets))(*[-1 if each is None else each.fileno() for each in sockets])
        self._handle = _OPEN(rank, numbers, len(sockets))
        if not self._handle:
            raise MemoryError("there is no memory left for the connections between workers")
        self._peer, self._error = ctypes.c_int32(), ctypes.c_int32()
        self._closed, self._running = False, threading.Lock()  # while the loops run, nobody may free what they use
        self._kept: dict[int, object] = {}
        _open_meshes.add(self)

    def begin(self, program: Program, places: Sequence[int], keep: object) -> int:
        """Begin to run a program on memory at these addresses; returns the word's number.

        keep: what owns this memory. It lives until the word is answered or all is closed, since the loops go on with
        what nobody waits for, after a failure elsewhere.
        """
        where = (ctypes.c_void_p * len(places))(*places)
        rows, sizes = program.rows, program.sizes
        counts = program.format, program.divisor, program.form
        with self._running:
            self._refuse_closed()
            word = _BEGIN(self._handle, rows, len(rows) // 5, where, sizes, len(places), *counts)
            self._kept[word] = keep
        return word

    def wait(self, word: int) -> None:
        """Return when the word's program is done. Raises PeerLost, and MismatchError where a peer says another word."""
        while (answer := self._move_on(word)) == NOT_YET:
            pass
        if answer == MISMATCH:
            raise MismatchError(
                f"rank {self._peer.value} said another word than rank {self.rank} at the same place, as number {word}: "
                "other tensors, other sizes, or another order. All ranks must run the same program with the same "
                "recipe: look for what depends on the rank before attach, and for steps that only some make."
            )
        if answer == GONE:
            self._refuse_closed()
            why = os.strerror(self._error.value) if self._error.value > 0 else "it closed the connection"
            raise PeerLost(f"rank {self._peer.value} is gone ({why})")
        if answer != FINISHED:
            raise AssertionError(f"word {word} is not under way: it was waited for before")
        self._kept.pop(word, None)

    def _move_on(self, word: int) -> int:
        with self._running:
            self._refuse_closed()
            peer, error = ctypes.byref(self._peer), ctypes.byref(self._error)
            return _WAIT(self._handle, word, PATIENCE_MILLISECONDS, peer, error)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PeerLost("its own connections were closed here")

    def round_trips(self) -> list[float]:
        """Seconds to each rank and back as the kernel has measured them, 0 where it does not say."""
        return [0.0 if each is None else _round_trip_seconds(each) for each in self._sockets]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for each in filter(None, self._sockets):
            with suppress(OSError):  # the peer has hung up before
                each.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in the loops
        with self._running:
            _CLOSE(self._handle)
        self._leave()

    def leave_in_child(self) -> None:
        """A forked child must not keep its parent's connections: the peers would not notice that the parent ended.

        Nor may it run the loops, which know sockets by numbers that the child will give to other files.
        """
        self._closed, self._running = True, threading.Lock()  # a thread that is not here may hold the other one
        self._leave()

    def _leave(self) -> None:
        self._kept.clear()
        for each in filter(None, self._sockets):
            each.close()


def _round_trip_seconds(connection: socket.socket) -> float:
    """tcpi_rtt of Linux' struct tcp_info: eight bytes, then numbers of 32 bits, of which this is the 16th."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    at = 8 + 15 * 4
    answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + 4)
    return int.from_bytes(answer[at : at + 4], "little") / 1e6


def _leave_in_child() -> None:
    for mesh in list(_open_meshes):
        mesh.leave_in_child()


os.register_at_fork(after_in_child=_leave_in_child)
