"""Span recorder: each thread appends its spans to a list of its own, which a writer thread packs into the file.

One call per span, which makes no object that lasts, takes no lock and never meets the disk: a disk that stalls, stalls
the writer. A killed process loses what it recorded in its last second.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Protocol
from weakref import WeakKeyDictionary

from gossamer.base.spans.record_format import (
    EVERYONE,
    FIELDS,
    MAGIC,
    MOST_PEERS,
    RECORD,
    SUFFIX,
    VERSION,
    SpanKind,
    Untraced,
)
from gossamer.base.spans.step_range import StepRange

WRITE_SECONDS = 1.0
CLOSE_SECONDS = 30.0  # for a disk to take the rest
MOST_BYTES = 2**30  # of a process's file: some twenty million spans
MOST_WAITING = 2**18  # spans that the disk has not taken: some 60 MB of memory
NO_STEPS = StepRange(-1, -1)

Numbers = tuple[float, float, int, int, int, int, int, int]  # one span, in the order of FIELDS
MANY = 256
_MANY = Struct(f"<{RECORD.format.lstrip('<') * MANY}")
_WIDTH = len(FIELDS)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHIFTED = Path("/proc/self/timens_offsets")  # a time namespace moves the clock of its processes


class SpanBuffer:
    """The spans of one thread that are not written yet, as one flat list of numbers.

    keep: appends one span, in one step that no other thread divides.

    The garbage collector does not follow numbers in a list. One struct packs many records at once, in 0.06 us each;
    one record at a time takes 0.14.
    """

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self.keep = self._numbers.extend

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    def take(self) -> Iterator[bytes]:
        """What was kept so far, in packs of MANY records at most; from another thread, while this one goes on."""
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
    """A transport, as far as its operations are to be found again in other ranks' files."""

    rank: int
    world: int


class SpanRecorder:
    """Spans of this process, in a file of its own in `folder`. steps: those that are recorded; all others cost little.

    Moments are seconds of time.perf_counter(). Raises OSError where the file cannot be made.
    """

    def __init__(self, folder: Path, rank: int, world: int, steps: StepRange, clock: str = "") -> None:
        """clock: by which name others know its clock; this machine's where it is not given."""
        self.rank, self.world, self._steps = rank, world, steps
        self.recording = 1 in steps
        self.backward_began: float | None = None
        self.follow: Callable[[bool], None] | None = None  # told before each forward pass whether it is recorded
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"trace-{rank}-{os.getpid()}-{secrets.token_hex(3)}{SUFFIX}"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._bytes, self._closing = os.write(self._file, self._header(clock)), threading.Lock()
        self._threads = threading.local()
        self._all: list[SpanBuffer] = []
        self._channels: WeakKeyDictionary[NumberedGroup, int] = WeakKeyDictionary()
        self._counts: list[int] = []  # of operations so far, by channel
        self._over = threading.Event()
        self._writer = threading.Thread(target=self._write_on, name="gossamer-spans", daemon=True)
        self._writer.start()

    def _header(self, clock: str) -> bytes:
        about = {
            "format": MAGIC,
            "version": VERSION,
            "rank": self.rank,
            "world": self.world,
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
        """Something that this thread did from `begin` to `end`."""
        if self.recording:
            try:
                keep = self._threads.keep
            except AttributeError:  # its first span
                keep = self._new_thread()
            keep((begin, end, kind, 0, 0, number, 0, 0))

    def operation(
        self, begin: float, end: float, position: tuple[int, int], code: int, nbytes: int, peers: int
    ) -> None:
        """A collective operation that was begun and answered then. peers: whose part the answer holds (`mask`)."""
        if self.recording:
            channel, number = position
            keep = getattr(self._threads, "keep", None) or self._new_thread()
            keep((begin, end, SpanKind.OPERATION, channel, code, number, nbytes, peers))

    def position(self, group: NumberedGroup) -> tuple[int, int]:
        """The channel and number of a group's next operation, which are the same on every rank.

        All ranks begin the same operations in the same order, so counting them is enough; a group that makes operations
        again, after it has lost a member, says their numbers itself.
        """
        channel = self._channels.get(group)
        told: int | None = getattr(group, "operation_number", None)
        if channel is None:
            channel = self._channels[group] = len(self._counts)
            self._counts.append(0)
            first, world = (0, 0) if told is not None else (self.rank - group.rank, group.world)
            now = time.perf_counter()
            keep = getattr(self._threads, "keep", None) or self._new_thread()
            keep((now, now, SpanKind.CHANNEL, channel, 0, first, world, 0))
        number = self._counts[channel] if told is None else told
        self._counts[channel] += 1
        return channel, number

    def lacks(self, what: Untraced) -> None:
        """Something goes on that no span tells of: readers say so."""
        now = time.perf_counter()
        keep = getattr(self._threads, "keep", None) or self._new_thread()
        keep((now, now, SpanKind.NOT_TRACED, 0, 0, what, 0, 0))

    # -- of the training thread ----------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """The first gradient of a backward pass is there, or is about to be: what is said first counts."""
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
            self._end("the disk takes less than is recorded; record fewer steps: --trace 100:200")

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
        """What all threads have recorded so far; the writer thread does so every second."""
        with self._closing:
            for spans in self._all:
                for packed in spans.take():
                    self._append(packed)

    def _append(self, packed: bytes) -> None:
        """A disk that is full ends the trace, not training."""
        if self._file < 0:
            return
        try:
            wrote = os.write(self._file, packed)
            why = "the disk took a part of it" if wrote < len(packed) else ""
        except OSError as error:
            wrote, why = 0, error.strerror or str(error)
        self._bytes += wrote
        if self._bytes >= MOST_BYTES:
            why = f"it holds {MOST_BYTES >> 30} GiB; record fewer steps: --trace 100:200"
        if why:
            self._close_file()
            self._end(why)

    def _end(self, why: str) -> None:
        self.recording = False
        if self._steps != NO_STEPS:
            self._steps = NO_STEPS
            logging.getLogger("gossamer").warning(
                "%s ends here: %s. Training goes on without being traced.", self.path, why
            )

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        """Write what all threads have recorded, if the disk takes it in CLOSE_SECONDS."""
        self.recording = False
        if self.follow is not None:
            self.follow(False)
        self._over.set()
        self._writer.join(CLOSE_SECONDS)
        if self._writer.is_alive():
            self._end(f"its disk has taken nothing for {CLOSE_SECONDS:.0f} s")
            return
        self.write()
        self._close_file()


def mask(ranks: Iterable[int], world: int) -> int:
    """A bit for each rank; EVERYONE for all of the group."""
    bits = set(ranks)
    return EVERYONE if len(bits) >= world else sum(1 << rank for rank in bits if rank < MOST_PEERS)


def clock_identity() -> str:
    """Name the clock of time.perf_counter(). Processes that return the same text share it, so their moments compare.

    On Linux all processes since one boot share it, also in containers. Elsewhere each process has a clock of its own.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            shifts = _SHIFTED.read_text().split() if _SHIFTED.exists() else []
            moved = [word for word in shifts if word.lstrip("-").isdigit() and int(word)]
            return "-".join(["boot", _BOOT.read_text().strip(), *(shifts if moved else ())])
    return f"process-{socket.gethostname()}-{os.getpid()}"
