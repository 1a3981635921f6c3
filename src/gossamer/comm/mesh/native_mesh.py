"""Native mesh: programs of messages over connections between all workers, run by compiled loops.

The loops are in kernels-src/mesh.hpp. A message leaves at once, whether its receiver waits for it or not. A peer that
ends is noticed at once; one that issues another collective is named, and so is one that is silent.
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

from gossamer.base import flight_recorder
from gossamer.base.kernels.library import Count, Function, Pointer, library
from gossamer.comm.mesh import last_words
from gossamer.comm.mesh.program import Program
from gossamer.comm.mesh.sealing import LinksKeys, cipher_functions
from gossamer.comm.mesh.shared_memory import Memories
from gossamer.comm.mesh.stall_watchdog import StallTimeouts, StallWatchdog
from gossamer.comm.mesh.tcp_info import round_trip_seconds, unanswered_seconds
from gossamer.errors import MismatchError, PeerLost

# Linux tells of an end behind what is unread. Elsewhere it is seen where all is ended, both ways
_ENDED = getattr(select, "POLLRDHUP", 0)
_SEEN = _ENDED | getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0)


def hung_up(connections: Sequence[socket.socket | None]) -> list[int]:
    """Ranks. Nothing is taken from their connections, and nobody is waited for."""
    if not hasattr(select, "poll"):
        return []
    ranks = {each.fileno(): rank for rank, each in enumerate(connections) if each is not None}
    asked = select.poll()
    for number in ranks:
        asked.register(number, _ENDED)
    return sorted(ranks[number] for number, told in asked.poll(0) if told & _SEEN)


FINISHED, NOT_YET, GONE, MISMATCH = 0, 1, -11, -12  # Ending in kernels-src/mesh.hpp
CHANGED = -2  # of Gone in kernels-src/mesh.hpp
NOT_ITS_OWN = (
    "what came is not what it sealed: the traffic was changed on its way, or its end holds other keys; nothing of it "
    "was used, and the connection is closed"
)
SHARED = SEALED = 0
TAG_BYTES = 16
TURN_MILLISECONDS = 500  # after which another thread may close, and silence is checked
NEWS_SECONDS = 0.05  # for others to see themselves who is gone, where they cannot be told
MOMENT_MILLISECONDS = 1  # that an idle thread spends on pending operations at a time

_OPEN = Function("gossamer_mesh_open", Count, Pointer, Count)
_CLOSE = Function("gossamer_mesh_close", Pointer)
_SHARE = Function("gossamer_mesh_share", Pointer, Count, Pointer, Count)
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
    """Whether the compiled loops are there."""
    return library() is not None


class Mesh:
    """One rank's end of all connections. Operations come from one thread at a time, in the same order on every rank.

    Any thread may close it; an operation that is waited for then raises PeerLost, for the reason that was given.
    keys: of all connections, which are encrypted with them; where it is None, everything travels as it is.
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
            raise MemoryError("there is no memory left for the connections between workers")
        self._peer, self._error = ctypes.c_int32(), ctypes.c_int32()
        self._closed, self._running = False, threading.Lock()  # while the loops run, their memory may not be freed
        self._closing = threading.Lock()  # or two threads at once would free it twice
        self._before_leaving: Callable[[], object] = lambda: None
        self._kept: dict[int, object] = {}
        self._next = 0  # the next operation's number
        self._answered: set[int] = set()  # of those, what is done and was not waited for yet
        self._why = (
            f"this session was closed on rank {rank} while a collective was pending; call session.close() after the "
            "last backward()"
        )
        _open_meshes.add(self)
        self.share(shared or {})
        if keys is not None:
            self._seal(keys)

    def share(self, memories: Memories) -> None:
        """Let messages lie in memory that is shared with these ranks; they do the same before their next operation."""
        with self._running:
            self._refuse_closed()
            self._shared |= memories
            for peer, memory in memories.items():
                start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                if _SHARE(self._handle, peer, start, len(memory)) != SHARED:
                    raise AssertionError(f"memory shared with rank {peer} has {len(memory)} bytes, no size of it")

    def _seal(self, keys: LinksKeys) -> None:
        missing = {peer for peer, each in enumerate(self._sockets) if each is not None} - keys.keys()
        if missing:
            raise ValueError(f"there are no keys of the connections to ranks {sorted(missing)}, which would be plain")
        for peer, link in keys.items():
            functions = cipher_functions(link.cipher)
            if _SEAL(self._handle, peer, functions, link.sends, link.hears) != SEALED:
                raise AssertionError(f"libcrypto refuses {link.cipher}")

    def begin(self, program: Program, places: Sequence[int], keep: object, sources: Sequence[int] | None = None) -> int:
        """Begin to run a program on memory at these addresses; returns the operation's number.

        sources: where the pieces' first contents are, if not at their places; what lies there is only read.
        keep: the owner of this memory. It lives until the operation is answered or all is closed, since after a failure
        elsewhere the loops go on with operations that are not waited for.
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
        """Return when the operation is done. Raises PeerLost, and MismatchError where a peer issues another one."""
        answer = FINISHED if op in self._answered else self._turn(op)
        if answer == NOT_YET:
            answer = self._wait_long(op)
        if answer == MISMATCH and not self.sealed and (told := last_words.waiting(self._sockets, self._peer.value)):
            raise PeerLost(told)
        if answer == MISMATCH:
            self._refuse_closed()  # by another thread meanwhile, before the words could be read that had come
            raise MismatchError(
                f"rank {self._peer.value} issued another collective than rank {self.rank} as operation {op}: other "
                "tensors, other sizes, or another order. All ranks must run the same program with the same recipe: "
                "look for what depends on the rank before attach, and for steps that only some make."
            )
        if answer == GONE:
            self._refuse_closed()
            raise PeerLost(self._cause(self._peer.value, self._error.value))
        if answer != FINISHED:
            raise AssertionError(f"operation {op} is not pending: it was waited for before")
        self._kept.pop(op, None)
        self._answered.discard(op)

    def make_progress(self) -> bool:
        """Advance pending operations for a moment though none is waited for; False where that is no use.

        What goes wrong is raised by `wait`.
        """
        op = next((each for each in list(self._kept) if each not in self._answered), None)
        if op is None:
            return False
        with suppress(PeerLost):  # closed meanwhile
            answer = self._run(op, MOMENT_MILLISECONDS)
            if answer == FINISHED:
                self._answered.add(op)
            return answer in (FINISHED, NOT_YET)
        return False

    def _wait_long(self, op: int) -> int:
        silence = StallWatchdog(self.rank, self._patience, self._unanswered_seconds)
        while (answer := self._turn(op)) == NOT_YET:
            moved, waited_for = self._waits_for(op)
            flight_recorder.current.waiting.waits_for = tuple(waited_for)
            silence.look(moved, waited_for)
        if answer == FINISHED:
            silence.end()
        return answer

    def _waits_for(self, op: int) -> tuple[list[int], list[int]]:
        """Numbers that change with every byte of the peers that an operation needs; and whose part is next, by rank."""
        moved, following = (ctypes.c_int64 * self.world)(), (ctypes.c_int32 * self.world)()
        with self._running:
            self._refuse_closed()
            _WAITS_FOR(self._handle, op, moved, following)
        return list(moved), [rank for rank in range(self.world) if following[rank]]

    def _turn(self, op: int) -> int:
        return self._run(op, TURN_MILLISECONDS)

    def _run(self, op: int, milliseconds: int) -> int:
        with self._running:
            self._refuse_closed()
            peer, error = ctypes.byref(self._peer), ctypes.byref(self._error)
            return _WAIT(self._handle, op, milliseconds, peer, error)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PeerLost(self._why)

    def hung_up(self) -> list[int]:
        """Ranks that have hung up, though no operation waits for them. Raises PeerLost where this one has."""
        with self._running:  # or numbers of sockets could be another file's
            self._refuse_closed()
            return hung_up(self._sockets)

    def break_off(self, why: str) -> NoReturn:
        """Raise PeerLost for a peer that has hung up, as an operation does that waits for it; else for `why`. Nothing
        else may be heard afterwards."""
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

    def _say(self, why: str) -> None:
        if not self._running.acquire(blocking=False):
            return  # the loops run in another thread, so nobody knows where a message ends
        try:
            peers = [(peer, each) for peer, each in enumerate(self._sockets) if each is not None]
            reached = [(peer, each) for peer, each in peers if _IS_BETWEEN_MESSAGES(self._handle, peer)]
            for peer, each in reached:
                last_words.say(each, why, self._next, partial(self._seal_words, peer) if self.sealed else None)
        finally:
            self._running.release()
        if len(reached) < len(peers):
            time.sleep(NEWS_SECONDS)  # nothing could wake it: what is waited for happens on other machines

    def round_trips(self) -> list[float]:
        """Seconds to each rank and back as the kernel has measured them, 0 where it does not say."""
        return [0.0 if each is None else round_trip_seconds(each) for each in self._sockets]

    def _unanswered_seconds(self, peer: int) -> float:
        connection = self._sockets[peer]
        return 0.0 if connection is None else unanswered_seconds(connection)

    def close(self, why: str = "") -> None:
        """Hang up. why: what operations then raise, here and as far as it can be told to them at the peers.

        Where it is not given, peers learn nothing, and operations here raise that a session was closed too early.
        """
        with self._closing:
            if self._closed:
                return
            self._why = why or self._why
            self._closed = True
        if why:
            self._say(why)
        for each in filter(None, self._sockets):
            with suppress(OSError):  # the peer has hung up before
                each.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in the loops
        with self._running:
            _CLOSE(self._handle)
        self._leave()

    def leave_in_child(self) -> None:
        """A forked child must not keep its parent's connections: the peers would not notice that the parent ended.

        Nor may it run the loops, which know sockets by numbers that the child will give to other files.
        """
        self._closed, self._running = True, threading.Lock()  # a thread that is not here may hold the other one
        self._leave()

    def call_before_leaving(self, call: Callable[[], object]) -> None:
        """`call` is made once, while the connections' last numbers can still be read."""
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


os.register_at_fork(after_in_child=_leave_in_child)
