"""Every worker connected to every other, and programs of messages that run over these connections.

The loops are compiled (kernels-src/mesh.hpp). A message leaves at once, whether its receiver waits for it or not; a
peer that ends is noticed at once, and one that says another word is named.
"""

from __future__ import annotations

import ctypes
import os
import socket
import weakref
from collections.abc import Sequence

from gossamer.errors import MismatchError, PeerLost
from gossamer.kernels.native import Count, Function, Pointer, library
from gossamer.transports.programs import Program

FINISHED, NOT_YET, GONE, MISMATCH = 0, 1, -11, -12  # Ending in kernels-src/mesh.hpp
PATIENCE_MILLISECONDS = 500  # after which a signal may be handled

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
    """One rank's end of all connections. Calls come from one thread at a time, in the same order on every rank."""

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None]) -> None:
        self.rank, self.world = rank, len(sockets)
        self._sockets = sockets
        numbers = (ctypes.c_int32 * len(sockets))(*[-1 if each is None else each.fileno() for each in sockets])
        self._handle = _OPEN(rank, numbers, len(sockets))
        if not self._handle:
            raise MemoryError("there is no memory left for the connections between workers")
        self._peer, self._error = ctypes.c_int32(), ctypes.c_int32()
        _open_meshes.add(self)

    def begin(self, program: Program, places: Sequence[int]) -> int:
        """Begin to run a program on memory at these addresses, which must stay until `wait` has returned.

        Returns the word's number.
        """
        where = (ctypes.c_void_p * len(places))(*places)
        rows, sizes = program.rows, program.sizes
        counts = program.format, program.divisor, program.form
        return _BEGIN(self._handle, rows, len(rows) // 5, where, sizes, len(places), *counts)

    def wait(self, word: int) -> None:
        """Return when the word's program is done. Raises PeerLost, and MismatchError where a peer says another word."""
        while (
            answer := _WAIT(
                self._handle, word, PATIENCE_MILLISECONDS, ctypes.byref(self._peer), ctypes.byref(self._error)
            )
        ) == NOT_YET:
            pass
        if answer == MISMATCH:
            raise MismatchError(
                f"rank {self._peer.value} said another word than rank {self.rank} at the same place, as number {word}: "
                "other tensors, other sizes, or another order. All ranks must run the same program with the same "
                "recipe: look for what depends on the rank before attach, and for steps that only some make."
            )
        if answer != FINISHED:
            why = os.strerror(self._error.value) if self._error.value > 0 else "it closed the connection"
            raise PeerLost(f"rank {self._peer.value} is gone ({why})")

    def round_trips(self) -> list[float]:
        """Seconds to each rank and back as the kernel has measured them, 0 where it does not say."""
        return [0.0 if each is None else _round_trip_seconds(each) for each in self._sockets]

    def close(self) -> None:
        if self._handle:
            _CLOSE(self._handle)
            self._handle = 0
        self.leave()

    def leave(self) -> None:
        for each in self._sockets:
            if each is not None:
                each.close()


def _round_trip_seconds(connection: socket.socket) -> float:
    """tcpi_rtt of Linux' struct tcp_info: eight bytes, then numbers of 32 bits, of which this is the 16th."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    at = 8 + 15 * 4
    answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + 4)
    return int.from_bytes(answer[at : at + 4], "little") / 1e6


def _leave_in_child() -> None:
    """A forked child must not keep its parent's connections: the peers would not notice that the parent ended."""
    for mesh in list(_open_meshes):
        mesh.leave()


os.register_at_fork(after_in_child=_leave_in_child)
