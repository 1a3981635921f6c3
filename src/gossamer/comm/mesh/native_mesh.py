"""Native mesh: runs programs of messages over connections between all workers, in compiled loops.

The loops are in kernels-src/mesh.hpp. A message is sent at once, whether or not its receiver waits for it. A peer that
disconnects is detected at once; a peer that issues another collective, or is silent, is named in the error.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from gossamer.base import flight_recorder, system
from gossamer.base.kernels.library import Count, Function, Pointer, library
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP, Bandwidth, current
from gossamer.comm.libcrypto import cipher_functions
from gossamer.comm.mesh import last_words
from gossamer.comm.mesh.program import Program
from gossamer.comm.mesh.sealing import LinksKeys
from gossamer.comm.mesh.shared_memory import Memories
from gossamer.comm.mesh.stall_watchdog import StallTimeouts, StallWatchdog
from gossamer.comm.mesh.tcp_info import round_trip_seconds, transferred_bytes, unanswered_seconds
from gossamer.errors import MismatchError, PeerLost

# Linux reports a shutdown behind unread data. Other systems only report it once both directions are shut down
_ENDED = getattr(select, "POLLRDHUP", 0)
_SEEN = _ENDED | getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0)


def hung_up(connections: Sequence[socket.socket | None]) -> list[int]:
    """Return the ranks that have disconnected, without reading from their connections or blocking."""
    if not hasattr(select, "poll"):
        return []
    ranks = {each.fileno(): rank for rank, each in enumerate(connections) if each is not None}
    asked = select.poll()
    for number in ranks:
        asked.register(number, _ENDED)
    return sorted(ranks[number] for number, events_seen in asked.poll(0) if events_seen & _SEEN)


FINISHED, NOT_YET, GONE, MISMATCH = 0, 1, -11, -12  # Ending in kernels-src/mesh.hpp
CHANGED = -2  # of Gone in kernels-src/mesh.hpp
MISMATCHED = " issued another collective than rank "
NOT_ITS_OWN = (
    "the received data failed authentication: it was modified in transit, or the peer has other keys. The data was "
    "discarded, and the connection is closed"
)
SHARED = SEALED = 0
TAG_BYTES = 16
TURN_MILLISECONDS = 500  # after which another thread may close, and silence is checked
NEWS_SECONDS = 0.05  # time for the other ranks to detect the failure themselves if they cannot be notified
MOMENT_MILLISECONDS = 1  # that an idle thread spends on pending operations at a time

_OPEN = Function("gossamer_mesh_open", Count, Pointer, Count)
_CLOSE = Function("gossamer_mesh_close", Pointer)
_SHARE = Function("gossamer_mesh_share", Pointer, Count, Pointer, Count)
_LIMIT = Function("gossamer_mesh_limit", Pointer, Count, Pointer)
_SEAL = Function("gossamer_mesh_seal", Pointer, Count, Pointer, Pointer, Pointer)
_BEGIN = Function(
    "gossamer_mesh_begin", Pointer, Pointer, Count, Pointer, Pointer, Pointer, Count, Count, ctypes.c_double, Count
)
_WAIT = Function("gossamer_mesh_wait", Pointer, Count, Count, Pointer, Pointer)
_WAITS_FOR = Function("gossamer_mesh_waits_for", Pointer, Count, Pointer, Pointer)
_SEAL_WORDS = Function("gossamer_mesh_seal_words", Pointer, Count, Pointer, Count)
_OPEN_WORDS = Function("gossamer_mesh_open_words", Pointer, Count, Pointer, Count)
_IS_BETWEEN_MESSAGES = Function("gossamer_mesh_is_between_messages", Pointer, Count)

_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def available() -> bool:
    """Whether the compiled loops are installed."""
    return library() is not None


class Mesh:
    """One rank's end of all connections.

    One thread at a time issues operations, in the same order on every rank. Any thread may close the mesh; a pending
    `wait` then raises PeerLost with the given reason.

    Args:
        rank: This rank.
        sockets: By rank; None at `rank`.
        patience: Timeouts for silent peers.
        shared: Memory shared with other ranks.
        keys: Encryption keys of all connections; None for unencrypted connections.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket.socket | None],
        patience: StallTimeouts | None = None,
        shared: Memories | None = None,
        keys: LinksKeys | None = None,
    ) -> None:
        self.rank, self.world, self.sealed = rank, len(sockets), keys is not None
        self._patience = patience or StallTimeouts()
        self._sockets, self._shared = sockets, Memories()
        numbers = (ctypes.c_int32 * len(sockets))(*[-1 if each is None else each.fileno() for each in sockets])
        self._handle = _OPEN(rank, numbers, len(sockets))
        if not self._handle:
            raise MemoryError("out of memory for the connections between workers")
        self._peer, self._error = ctypes.c_int32(), ctypes.c_int32()
        self._closed, self._running = False, threading.Lock()  # held while the loops use their memory
        self._closing = threading.Lock()  # prevents a double free by two threads
        self._before_leaving: Callable[[], object] = lambda: None
        self._kept: dict[int, object] = {}
        self._next = 0  # number of the next operation
        self._answered: set[int] = set()  # completed operations on which no thread has waited
        self._mismatch = ""  # why no operation can complete any more, once a peer has issued another one
        self._why = (
            f"this session was closed on rank {rank} while a collective was pending; call session.close() after the "
            "last backward()"
        )
        _open_meshes.add(self)
        self.share(shared or {})
        if keys is not None:
            self._seal(keys)
        self._bandwidth = current()  # the loops use its memory
        if self._bandwidth is not None:
            self._limit(self._bandwidth)

    def share(self, memories: Memories) -> None:
        """Send messages to these ranks through shared memory; they do the same before their next operation."""
        with self._running:
            self._refuse_closed()
            self._shared |= memories
            for peer, memory in memories.items():
                start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                if _SHARE(self._handle, peer, start, len(memory)) != SHARED:
                    raise AssertionError(f"memory shared with rank {peer} has an invalid size of {len(memory)} bytes")

    def _seal(self, keys: LinksKeys) -> None:
        missing = {peer for peer, each in enumerate(self._sockets) if each is not None} - keys.keys()
        if missing:
            raise ValueError(f"keys are missing for the connections to ranks {sorted(missing)}")
        for peer, link in keys.items():
            functions = cipher_functions(link.cipher)
            if _SEAL(self._handle, peer, functions, link.sends, link.receives) != SEALED:
                raise AssertionError(f"libcrypto rejected {link.cipher}")

    def _limit(self, bandwidth: Bandwidth) -> None:
        """Limit the connections to other machines, and count what they have carried: the handshakes."""
        for peer, each in enumerate(self._sockets):
            if each is not None and (meter := bandwidth.meter(each)) is not None:
                for way, nbytes in zip((UP, DOWN), transferred_bytes(each), strict=True):
                    meter.transferred(way, nbytes)
                _LIMIT(self._handle, peer, bandwidth.address)

    def begin(self, program: Program, places: Sequence[int], keep: object, sources: Sequence[int] | None = None) -> int:
        """Begin to run a program, and return the operation's number.

        Args:
            program: This rank's part of the operation.
            places: Addresses of the pieces.
            keep: Owner of this memory. It is kept alive until the operation is complete or the mesh is closed, because
                after a failure of another operation the loops continue with those on which no thread waits.
            sources: Addresses of the pieces' initial contents, if not `places`; only read.
        """
        where = (ctypes.c_void_p * len(places))(*places)
        given = where if sources is None else (ctypes.c_void_p * len(places))(*sources)
        rows, sizes = program.rows, program.sizes
        counts = program.format, program.divisor, program.form
        with self._running:
            self._refuse_closed()
            op = _BEGIN(self._handle, rows, len(rows) // 5, where, given, sizes, len(places), *counts)
            self._kept[op], self._next = keep, op + 1
        return op

    def wait(self, op: int) -> None:
        """Wait for an operation. Raises PeerLost, or MismatchError on all ranks if two operations differ."""
        answer = FINISHED if op in self._answered else self._run(op, TURN_MILLISECONDS)
        if answer == NOT_YET:
            answer = self._wait_long(op)
        if (
            answer == MISMATCH
            and not self.sealed
            and (events_seen := last_words.waiting(self._sockets, self._peer.value))
        ):
            self._raise_lost(events_seen)
        if answer == MISMATCH:
            self._refuse_closed()  # closed by another thread before the last words were read
            self._end_by_mismatch(
                f"rank {self._peer.value}{MISMATCHED}{self.rank} as operation {op}: other tensors, other sizes, or "
                "another order. All ranks must run the same program with the same recipe. "
                "Check for code before attach that depends on the rank, and for steps that only some ranks make."
            )
        if answer == GONE:
            self._refuse_closed()
            self._raise_lost(self._cause(self._peer.value, self._error.value))
        if answer != FINISHED:
            raise AssertionError(f"operation {op} is not pending: it was awaited before")
        self._kept.pop(op, None)
        self._answered.discard(op)

    def make_progress(self) -> bool:
        """Advance pending operations for a moment without waiting; False if there is nothing to advance.

        Errors are raised by `wait`.
        """
        for op in list(self._kept):
            if op in self._answered:
                continue
            with suppress(PeerLost, MismatchError):  # closed meanwhile, or broken before
                answer = self._run(op, MOMENT_MILLISECONDS)
                if answer == FINISHED:
                    self._answered.add(op)
                return answer in (FINISHED, NOT_YET)
            return False
        return False

    def _wait_long(self, op: int) -> int:
        silence = StallWatchdog(self.rank, self._patience, self._unanswered_seconds)
        while (answer := self._run(op, TURN_MILLISECONDS)) == NOT_YET:
            moved, waited_for = self._waits_for(op)
            flight_recorder.current.waiting.waits_for = tuple(waited_for)
            silence.look(moved, waited_for)
        if answer == FINISHED:
            silence.end()
        return answer

    def _waits_for(self, op: int) -> tuple[list[int], list[int]]:
        """Return counters that change with every byte from peers that an operation needs, and the ranks needed next."""
        moved, following = (ctypes.c_int64 * self.world)(), (ctypes.c_int32 * self.world)()
        with self._running:
            self._refuse_closed()
            _WAITS_FOR(self._handle, op, moved, following)
        return list(moved), [rank for rank in range(self.world) if following[rank]]

    def _run(self, op: int, milliseconds: int) -> int:
        with self._running:
            self._refuse_closed()
            peer, error = ctypes.byref(self._peer), ctypes.byref(self._error)
            return _WAIT(self._handle, op, milliseconds, peer, error)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PeerLost(self._why)
        if self._mismatch:
            raise MismatchError(self._mismatch)

    def _raise_lost(self, why: str) -> NoReturn:
        if MISMATCHED in why:
            self._end_by_mismatch(why)
        raise PeerLost(why)

    def _end_by_mismatch(self, why: str) -> NoReturn:
        """Notify all ranks, which may wait for each other only, and raise MismatchError, as all later calls do.

        The connections stay open: closing one that has unread data would discard the words.
        """
        self._mismatch = why
        for each in self._send_last_words(why):
            with suppress(OSError):
                each.shutdown(socket.SHUT_WR)
        raise MismatchError(why)

    def hung_up(self) -> list[int]:
        """Return the ranks that have disconnected, even if no operation needs them. Raises PeerLost if closed."""
        with self._running:  # or numbers of sockets could be another file's
            self._refuse_closed()
            return hung_up(self._sockets)

    def break_off(self, why: str) -> NoReturn:
        """Raise PeerLost: for a disconnected peer, as a pending operation would, else with `why`. The connections
        cannot be used afterwards."""
        gone = self.hung_up()
        raise PeerLost(self._cause(gone[0], 0) if gone else why)

    def _cause(self, gone: int, error: int) -> str:
        why = os.strerror(error) if error > 0 else "it closed the connection"
        if not self.sealed:
            return last_words.cause(self._sockets, gone, why)
        with self._running:
            self._refuse_closed()
            why, comes = (NOT_ITS_OWN, True) if error == CHANGED else (why, False)
            return last_words.cause(self._sockets, gone, why, self._open_words, comes)

    def _seal_words(self, peer: int, words: bytes) -> bytes:
        room = ctypes.create_string_buffer(words, len(words) + TAG_BYTES)
        return room.raw if _SEAL_WORDS(self._handle, peer, room, len(words)) == SEALED else b""

    def _open_words(self, peer: int, words: bytes) -> bytes:
        room = ctypes.create_string_buffer(words, len(words))
        opened = _OPEN_WORDS(self._handle, peer, room, len(words) - TAG_BYTES) == SEALED
        return room.raw[:-TAG_BYTES] if opened else b""

    def _send_last_words(self, why: str) -> list[socket.socket]:
        """Send the words, and return the connections that cannot carry them within a message."""
        if not self._running.acquire(blocking=False):
            return []  # the loops run in another thread, so the message boundary is unknown
        try:
            peers = {peer: each for peer, each in enumerate(self._sockets) if each is not None}
            reached = [peer for peer in peers if _IS_BETWEEN_MESSAGES(self._handle, peer)]
            for peer in reached:
                seal = partial(self._seal_words, peer) if self.sealed else None
                last_words.send_words(peers.pop(peer), why, self._next, seal)
            return [*peers.values()]
        finally:
            self._running.release()

    def round_trips(self) -> list[float]:
        """Seconds to each rank and back as estimated by the kernel; 0 if unknown."""
        return [0.0 if each is None else round_trip_seconds(each) for each in self._sockets]

    def _unanswered_seconds(self, peer: int) -> float:
        connection = self._sockets[peer]
        return 0.0 if connection is None else unanswered_seconds(connection)

    def close(self, why: str = "") -> None:
        """Disconnect. why: the reason with which pending operations fail, here and if possible at the peers.

        Without a reason, peers receive no words, and operations here raise that the session was closed too early.
        """
        with self._closing:
            if self._closed:
                return
            self._why = why or self._why
            self._closed = True
        if why and not self._mismatch and self._send_last_words(why):
            time.sleep(NEWS_SECONDS)  # no event to wait for: it happens on other machines
        for each in filter(None, self._sockets):
            with suppress(OSError):  # the peer has disconnected before
                each.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in the compiled loops
        with self._running:
            _CLOSE(self._handle)
        self._leave()

    def leave_in_child(self) -> None:
        """Close the inherited connections in a forked child; otherwise peers would not detect that the parent ended.

        The child must not run the loops either, because their descriptors may be reused for other files.
        """
        self._closed, self._running = True, threading.Lock()  # a thread of the parent may hold the old lock
        self._leave()

    def call_before_leaving(self, call: Callable[[], object]) -> None:
        """Register a call that is made once before the connections close, while their counters can still be read."""
        self._before_leaving = call

    def _leave(self) -> None:
        self._before_leaving()
        self._kept.clear()
        for memory in self._shared.values():
            memory.close()
        for each in filter(None, self._sockets):
            each.close()


def _leave_in_child() -> None:
    for mesh in list(_open_meshes):
        mesh.leave_in_child()


system.after_fork_in_child(_leave_in_child)
