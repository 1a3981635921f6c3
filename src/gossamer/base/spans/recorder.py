"""Span recorder: each thread appends spans to its own list, and a writer thread packs them into the file.

A span costs one call, which allocates no lasting object, takes no lock and does no disk access: a stalled disk stalls
the writer only. A killed process loses the spans of its last second.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Protocol
from weakref import WeakKeyDictionary

from gossamer.base import system
from gossamer.base.spans.record_format import (
    EVERYONE,
    FIELDS,
    MAGIC,
    MOST_PEERS,
    NO_RANK,
    RECORD,
    SUFFIX,
    VERSION,
    SpanKind,
    Untraced,
)
from gossamer.base.spans.step_range import StepRange

WRITE_SECONDS = 1.0
CLOSE_SECONDS = 30.0  # timeout for the remaining writes
MOST_BYTES = 2**30  # of a process's file: some twenty million spans
MOST_WAITING = 2**18  # spans that are not written yet: some 60 MB of memory
NO_STEPS = StepRange(-1, -1)
NO_DETOURS: Mapping[int, int | None] = {}

Numbers = tuple[float, float, int, int, int, int, int, int]  # one span, in the order of FIELDS
MANY = 256
_MANY = Struct(f"<{RECORD.format.lstrip('<') * MANY}")
_WIDTH = len(FIELDS)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHIFTED = Path("/proc/self/timens_offsets")  # a time namespace shifts the clock of its processes


class SpanBuffer:
    """The unwritten spans of one thread, as one flat list of numbers.

    keep: appends one span, atomically.

    The garbage collector does not traverse numbers in a list. One struct packs many records at once, in 0.06 us each;
    one record at a time takes 0.14.
    """

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self.keep = self._numbers.extend

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    def take(self) -> Iterator[bytes]:
        """Return the spans so far, in packs of at most MANY records; another thread may append meanwhile."""
        count = len(self) * _WIDTH
        numbers = self._numbers[:count]
        del self._numbers[:count]
        at = 0
        while at + MANY * _WIDTH <= count:
            yield _MANY.pack(*numbers[at : at + MANY * _WIDTH])
            at += MANY * _WIDTH
        if at < count:
            yield b"".join(RECORD.pack(*numbers[each : each + _WIDTH]) for each in range(at, count, _WIDTH))


class NumberedGroup(Protocol):
    """A transport with operations that can be matched with those in other ranks' files."""

    rank: int
    world: int


class SpanRecorder:
    """Records the spans of this process in a file in `folder`, for the steps `steps`; other steps cost little.

    Times are seconds of time.perf_counter(). Raises OSError if the file cannot be created.
    """

    def __init__(self, folder: Path, rank: int, world: int, steps: StepRange, clock: str = "") -> None:
        """clock: name of the clock that readers compare; this machine's by default."""
        self.rank, self.world, self._steps = rank, world, steps
        self.recording = 1 in steps
        self.backward_began: float | None = None
        self.follow: Callable[[bool], None] | None = None  # called before each forward pass with whether it is recorded
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"trace-{rank}-{os.getpid()}-{secrets.token_hex(3)}{SUFFIX}"
        self._file = system.open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self._bytes, self._closing = os.write(self._file.fileno(), self._header(clock)), threading.Lock()
        self._threads = threading.local()
        self._all: list[SpanBuffer] = []
        self._channels: WeakKeyDictionary[NumberedGroup, int] = WeakKeyDictionary()
        self._counts: list[int] = []  # number of operations, by channel
        self._detours = NO_DETOURS  # of the group of the last operation that has some, or had
        self._over = threading.Event()
        self._writer = threading.Thread(target=self._write_on, name="gossamer-spans", daemon=True)
        self._writer.start()

    def _header(self, clock: str) -> bytes:
        about = {
            "format": MAGIC,
            "version": VERSION,
            "rank": self.rank,
            "world": self.world,
            "run": os.environ.get("GOSSAMER_RUN", ""),
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "clock": clock or clock_identity(),
            "moment": time.perf_counter(),
            "wall": time.time(),
        }
        return json.dumps(about).encode() + b"\n"

    # -- spans ---------------------------------------------------------------------------------------------------------

    def add(self, kind: int, begin: float, end: float, number: int = 0) -> None:
        """Record a span of this thread."""
        if self.recording:
            try:
                keep = self._threads.keep
            except AttributeError:  # the thread's first span
                keep = self._new_thread()
            keep((begin, end, kind, 0, 0, number, 0, 0))

    def operation(
        self, begin: float, end: float, position: tuple[int, int], code: int, nbytes: int, peers: int
    ) -> None:
        """Record a collective operation. peers: `mask` of the ranks with a part in the answer."""
        if self.recording:
            channel, number = position
            keep = getattr(self._threads, "keep", None) or self._new_thread()
            keep((begin, end, SpanKind.OPERATION, channel, code, number, nbytes, peers))

    def position(self, group: NumberedGroup) -> tuple[int, int]:
        """Return the channel and number of a group's next operation, which are the same on every rank.

        All ranks begin the same operations in the same order, so counting them is enough. A group that repeats
        operations after losing a member provides the numbers itself.
        """
        channel = self._channels.get(group)
        operation_number: int | None = getattr(group, "operation_number", None)
        if channel is None:
            channel = self._channels[group] = len(self._counts)
            self._counts.append(0)
            first, world = (0, 0) if operation_number is not None else (self.rank - group.rank, group.world)
            now = time.perf_counter()
            keep = getattr(self._threads, "keep", None) or self._new_thread()
            keep((now, now, SpanKind.CHANNEL, channel, 0, first, world, 0))
        detours: Mapping[int, int | None] = getattr(group, "detours", NO_DETOURS)
        if detours is not self._detours and (detours or self._detours):
            self._keep_detours(channel, detours)
        number = self._counts[channel] if operation_number is None else operation_number
        self._counts[channel] += 1
        return channel, number

    def _keep_detours(self, channel: int, detours: Mapping[int, int | None]) -> None:
        """Record which ranks are connected by relays from now on: a record for each relay, or one without ranks."""
        self._detours, now = detours, time.perf_counter()
        by_relay: dict[int, int] = {}
        for peer, relay in detours.items():
            if peer < MOST_PEERS:
                number = NO_RANK if relay is None else relay
                by_relay[number] = by_relay.get(number, 0) | 1 << peer
        keep = getattr(self._threads, "keep", None) or self._new_thread()
        for number, peers in sorted(by_relay.items()) or [(NO_RANK, 0)]:
            keep((now, now, SpanKind.RELAYED, channel, 0, number, 0, peers))

    def lacks(self, what: Untraced) -> None:
        """Record that the process has activity without spans, so that readers can report it."""
        now = time.perf_counter()
        keep = getattr(self._threads, "keep", None) or self._new_thread()
        keep((now, now, SpanKind.NOT_TRACED, 0, 0, what, 0, 0))

    # -- of the training thread ----------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Record the start of a backward pass, before its first gradient; repeated calls have no effect."""
        if self.backward_began is None:
            self.backward_began = time.perf_counter()

    def backward_ended(self) -> None:
        began, self.backward_began = self.backward_began, None
        if began is not None:
            self.add(SpanKind.BACKWARD, began, time.perf_counter())

    def step_ended(self, step: int, began: float, ended: float) -> None:
        self.add(SpanKind.STEP, began, ended, step)
        self.recording = step + 1 in self._steps
        if sum(map(len, self._all)) > MOST_WAITING:
            self._end("spans are recorded faster than the disk can write them; record fewer steps: --trace 100:200")

    # -- files ---------------------------------------------------------------------------------------------------------

    def _new_thread(self) -> Callable[[Numbers], None]:
        spans = SpanBuffer()
        self._all.append(spans)
        self._threads.keep = spans.keep
        return spans.keep

    def _write_on(self) -> None:
        while not self._over.wait(WRITE_SECONDS):
            self.write()

    def write(self) -> None:
        """Write all recorded spans; the writer thread calls it every second."""
        with self._closing:
            for spans in self._all:
                for packed in spans.take():
                    self._append(packed)

    def _append(self, packed: bytes) -> None:
        """Append to the file; a full disk ends the trace, not the training."""
        if self._file.closed:
            return
        try:
            wrote = os.write(self._file.fileno(), packed)
            why = "the disk wrote a part of it only" if wrote < len(packed) else ""
        except OSError as error:
            wrote, why = 0, error.strerror or str(error)
        self._bytes += wrote
        if self._bytes >= MOST_BYTES:
            why = f"it has {MOST_BYTES >> 30} GiB; record fewer steps: --trace 100:200"
        if why:
            self._file.close()
            self._end(why)

    def _end(self, why: str) -> None:
        self.recording = False
        if self._steps != NO_STEPS:
            self._steps = NO_STEPS
            logging.getLogger("gossamer").warning(
                "%s ends here: %s. Training continues without a trace.", self.path, why
            )

    def close(self) -> None:
        """Write all recorded spans, within CLOSE_SECONDS."""
        self.recording = False
        if self.follow is not None:
            self.follow(False)
        self._over.set()
        self._writer.join(CLOSE_SECONDS)
        if self._writer.is_alive():
            self._end(f"its disk has written nothing for {CLOSE_SECONDS:.0f} s")
            return
        self.write()
        self._file.close()


def mask(ranks: Iterable[int], world: int) -> int:
    """Return a bit for each rank; EVERYONE for all of the group."""
    bits = set(ranks)
    return EVERYONE if len(bits) >= world else sum(1 << rank for rank in bits if rank < MOST_PEERS)


def clock_identity() -> str:
    """Return a name of the clock of time.perf_counter(). Processes with the same name share it, so their times compare.

    On Linux all processes since one boot share it, also in containers. Elsewhere each process has its own clock.
    """
    if system.IS_LINUX:
        with suppress(OSError):
            shifts = _SHIFTED.read_text(encoding="utf-8").split() if _SHIFTED.exists() else []
            moved = [word for word in shifts if word.lstrip("-").isdecimal() and int(word)]
            return "-".join(["boot", _BOOT.read_text(encoding="utf-8").strip(), *(shifts if moved else ())])
    return f"process-{socket.gethostname()}-{os.getpid()}"
