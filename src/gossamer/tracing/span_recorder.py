"""Span recorder: each thread packs its spans into memory of its own, which is written when it is full or a second old.

One call per span: no lock, no object, no text. What a thread has not written yet is lost where the process is killed: a
second's spans at most, of a thread that is busy.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from gossamer.tracing.clock_identity import clock_identity
from gossamer.tracing.record_format import EVERYONE, MAGIC, MOST_PEERS, RECORD, SUFFIX, VERSION, SpanKind
from gossamer.tracing.step_range import StepRange

ROOM_RECORDS = 4096  # of a thread's memory: 200 kB
WRITE_SECONDS = 1.0
MOST_BYTES = 2**30  # of a process's file: some twenty million spans
_PACK = RECORD.pack_into


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
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"trace-{rank}-{os.getpid()}-{secrets.token_hex(3)}{SUFFIX}"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._bytes, self._closing = os.write(self._file, self._header(clock)), threading.Lock()
        self._threads = threading.local()
        self._all: list[ThreadSpans] = []
        self._channels: WeakKeyDictionary[NumberedGroup, int] = WeakKeyDictionary()
        self._counts: list[int] = []  # of operations so far, by channel

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
                pack = self._threads.pack
            except AttributeError:  # its first span
                pack = self._new_thread()
            pack(kind, begin, end, 0, 0, number, 0, 0)

    def operation(
        self, begin: float, end: float, position: tuple[int, int], code: int, nbytes: int, peers: int
    ) -> None:
        """A collective operation that was begun and answered then. peers: whose part the answer holds (`mask`)."""
        if self.recording:
            channel, number = position
            pack = getattr(self._threads, "pack", None) or self._new_thread()
            pack(SpanKind.OPERATION, begin, end, channel, code, number, nbytes, peers)

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
            pack = getattr(self._threads, "pack", None) or self._new_thread()
            pack(SpanKind.CHANNEL, now, now, channel, 0, first, world, 0)
        number = self._counts[channel] if told is None else told
        self._counts[channel] += 1
        return channel, number

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

    # -- files ---------------------------------------------------------------------------------------------------------

    def _new_thread(self) -> Callable[[int, float, float, int, int, int, int, int], None]:
        spans = ThreadSpans(self._write)
        self._all.append(spans)
        self._threads.pack = spans.pack
        return spans.pack

    def _write(self, spans: memoryview) -> None:
        """A disk that is full ends the trace, not training."""
        with self._closing:
            if self._file < 0:
                return
            try:
                wrote = os.write(self._file, spans)
                why = "the disk took a part of it" if wrote < len(spans) else ""
            except OSError as error:
                wrote, why = 0, error.strerror or str(error)
            self._bytes += wrote
            if self._bytes >= MOST_BYTES:
                why = f"it holds {MOST_BYTES >> 30} GiB; record fewer steps: --trace 100:200"
            if why:
                self.recording = False
                self._steps = StepRange(-1, -1)
                os.close(self._file)
                self._file = -1
                logging.getLogger("gossamer").warning(
                    "%s ends here: %s. Training goes on without being traced.", self.path, why
                )

    def close(self) -> None:
        """Write what all threads have recorded."""
        self.recording = False
        for spans in self._all:
            spans.flush()
        with self._closing:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


class ThreadSpans:
    """One thread's spans that are not written yet. write: takes whole records."""

    def __init__(self, write: Any) -> None:
        self._room, self._used, self._due, self._write = bytearray(ROOM_RECORDS * RECORD.size), 0, 0.0, write

    def pack(
        self, kind: int, begin: float, end: float, channel: int, code: int, number: int, nbytes: int, peers: int
    ) -> None:
        if end >= self._due or self._used == len(self._room):
            self.flush()
            self._due = end + WRITE_SECONDS
        _PACK(self._room, self._used, begin, end, kind, channel, code, number, nbytes, peers)
        self._used += RECORD.size

    def flush(self) -> None:
        if self._used:
            self._write(memoryview(self._room)[: self._used])
            self._used = 0


def mask(ranks: Iterable[int], world: int) -> int:
    """A bit for each rank; EVERYONE for all of the group."""
    bits = set(ranks)
    return EVERYONE if len(bits) >= world else sum(1 << rank for rank in bits if rank < MOST_PEERS)
