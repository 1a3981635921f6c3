"""Uplink: sends a launcher's rows to the first machine, over the connection that found its coordinator.

It never blocks: rows go into a bounded queue, and are dropped and counted if it is full. The launcher's own store keeps
all rows.
"""

from __future__ import annotations

import json
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from gossamer.base.peer_ops import Answer, Ask, Peer, Pull, Push, Stamp
from gossamer.comm.elastic.agent import LARGEST_FRAME_BYTES, RUN
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import GossamerError
from gossamer.observe.telemetry.batches import MOST_BYTES, count, pack
from gossamer.observe.telemetry.machines import BATCH, CLOCK, DONE, FULL
from gossamer.observe.telemetry.rows import NewRows

# -- clock offset ------------------------------------------------------------------------------------------------------
# Offset between another machine's clock and this one's, from round trips, with an error bound.

WINDOW_SECONDS = 600.0  # of round trips to keep
APART_SECONDS = 20.0  # minimum between two round trips to measure the drift
MOST_DRIFT = 500e-6  # seconds per second; quartz has a tenth of it
LOOSE_DRIFT = 20e-6  # error bound of the measured drift


class Offset(NamedTuple):
    """Add `seconds` to this machine's clock to get the other's. The error is at most `error`, also with asymmetric
    delays, since a reply cannot be sent before the request or arrive after it was received."""

    seconds: float
    error: float


@dataclass(frozen=True)
class _RoundTrip:
    moment: float  # middle of the round trip, by this machine's clock
    offset: float
    seconds: float


class ClockOffset:
    """Estimates the offset of another machine's clock from round trips.

    The offset is that of the trip with the smallest bound: half its round trip, and the possible drift since then in
    excess of the measured drift, the slope between the shortest trips of the older and the newer half. It is exact for
    symmetric delays, and wrong by half the difference of asymmetric ones, which the bound includes.
    source: Cristian 1989, Distributed Computing 3.
    """

    def __init__(self) -> None:
        self._trips: deque[_RoundTrip] = deque()

    def add(self, sent: float, recorded: float, received: float) -> None:
        """Add a round trip: the request was sent at `sent` and its answer received at `received` by this clock; the
        other clock showed `recorded` in between."""
        middle = (sent + received) / 2
        trip = _RoundTrip(middle, recorded - middle, received - sent)
        if received < sent or self._jumped(trip):
            self._trips.clear()  # one of the clocks was adjusted
        self._trips.append(trip)
        while self._trips[0].moment < middle - WINDOW_SECONDS:
            self._trips.popleft()

    def at(self, moment: float) -> Offset | None:
        """The offset at time `moment` of this clock; None before the first round trip."""
        if not self._trips:
            return None
        drift = self._drift()
        loose = LOOSE_DRIFT if drift is not None else MOST_DRIFT

        def bound(trip: _RoundTrip) -> float:
            return trip.seconds / 2 + loose * abs(moment - trip.moment)

        best = min(self._trips, key=bound)
        return Offset(best.offset + (drift or 0.0) * (moment - best.moment), bound(best))

    def _jumped(self, trip: _RoundTrip) -> bool:
        """Whether a clock was adjusted: two offsets differ by more than both bounds and any drift allow."""
        if not self._trips:
            return False
        before = self._trips[-1]
        passed = trip.moment - before.moment
        allowed = (trip.seconds + before.seconds) / 2 + MOST_DRIFT * abs(passed)
        return passed < 0 or abs(trip.offset - before.offset) > allowed

    def _drift(self) -> float | None:
        """Drift of the other clock in seconds per second; None while too little time has passed to measure it."""
        half = (self._trips[0].moment + self._trips[-1].moment) / 2
        older = [trip for trip in self._trips if trip.moment <= half]
        newer = [trip for trip in self._trips if trip.moment > half]
        if not newer:
            return None
        first, last = (min(trips, key=lambda trip: trip.seconds) for trips in (older, newer))
        if last.moment - first.moment < APART_SECONDS:
            return None
        slope = (last.offset - first.offset) / (last.moment - first.moment)
        return max(-MOST_DRIFT, min(MOST_DRIFT, slope))


MOST_WAITING = 64  # batches
ANSWER_SECONDS = 5.0
FAREWELL_SECONDS = 1.0
CLOCK_SECONDS = 5.0  # between round trips
AGAIN_SECONDS = 0.5  # after a full queue or a failed connection


class Line(Protocol):
    """A connection to the first machine's launcher, such as TcpEndpoint."""

    def answer(self, op: Ask) -> Any: ...


@dataclass(frozen=True)
class _Waiting:
    packed: bytes
    rows: int


class Uplink:
    """Sends rows in a thread while the block runs. line: opens the connection, in that thread.

    The clock offset of the two machines is measured continuously, and sent with each batch.
    """

    def __init__(
        self, line: Callable[[], AbstractContextManager[Line]], clock: Callable[[], float] = time.time
    ) -> None:
        self._line, self._clock = line, clock
        self._launcher = 1 + secrets.randbits(62)  # 0 is the first
        self._waiting: queue.Queue[_Waiting] = queue.Queue(MOST_WAITING)
        self._offsets = ClockOffset()
        self.dropped = 0  # rows, total
        self._reported_dropped = 0  # already reported to the first machine
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer uplink", daemon=True)

    def forward(self, rows: NewRows) -> None:
        """Queue rows to be sent; never blocks. Of more than one batch holds, printed lines are dropped first: they are
        most of it, and the logs of their machine have them."""
        packed = pack(rows)
        if packed is not None and len(packed) > MOST_BYTES:
            self.dropped += len(rows.tables["log"])
            rows = rows.without("log")
            packed = pack(rows)
        if packed is None:
            return
        try:
            if len(packed) > MOST_BYTES:
                raise queue.Full
            self._waiting.put_nowait(_Waiting(packed, count(rows)))
        except queue.Full:
            self.dropped += count(rows)

    def __enter__(self) -> Uplink:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Send the remaining rows, for at most the time of two answers."""
        self._over.set()
        self._thread.join(2 * ANSWER_SECONDS)

    def _run(self) -> None:
        with self._line() as line:
            number, asked = 0, -CLOCK_SECONDS
            while not (self._over.is_set() and self._waiting.empty()):
                if time.monotonic() >= asked + CLOCK_SECONDS:
                    asked = time.monotonic()
                    self._measure(line)
                try:
                    batch = self._waiting.get(timeout=AGAIN_SECONDS)
                except queue.Empty:
                    continue
                number += 1
                while not self._sent(line, number, batch):
                    if self._over.is_set():
                        return
                    self._over.wait(AGAIN_SECONDS)  # and once more at the end
            if number:
                _asked(
                    line,
                    Push(to=COORDINATOR, key=DONE, stamp=Stamp(self._launcher, 0), within_seconds=FAREWELL_SECONDS),
                )

    def _measure(self, line: Line) -> None:
        sent = self._clock()
        answer = _asked(line, Pull(of=COORDINATOR, key=CLOCK, within_seconds=ANSWER_SECONDS))
        if answer is not None:
            self._offsets.add(sent, float(answer.about), self._clock())

    def _sent(self, line: Line, number: int, batch: _Waiting) -> bool:
        if self._offsets.at(self._clock()) is None:
            self._measure(line)
        if (offset := self._offsets.at(self._clock())) is None:  # times of an unknown clock would be wrong
            return False
        dropped = self.dropped
        about = {
            "offset": offset.seconds,
            "error": offset.error,
            "dropped": dropped - self._reported_dropped,
            "machine": socket.gethostname(),
        }
        answer = _asked(
            line,
            Push(
                to=COORDINATOR,
                key=BATCH,
                stamp=Stamp(self._launcher, number),
                payload=(torch.frombuffer(bytearray(batch.packed), dtype=torch.uint8),),
                about=json.dumps(about),
                within_seconds=ANSWER_SECONDS,
            ),
        )
        if answer is None or answer.version == FULL:
            return False
        self._reported_dropped = dropped
        return True


def _asked(line: Line, ask: Ask) -> Answer | None:
    """The answer; None without one in time."""
    try:
        answer: Answer = line.answer(ask)
    except GossamerError:
        return None
    return answer


@contextmanager
def to_coordinator(address: tuple[str, int], token: bytes, tls: Tls | None = None) -> Iterator[Line]:
    """Connection to the launcher with the coordinator at this address. token: of the run."""
    me = Peer("launcher", secrets.randbits(63))  # neither worker nor server
    credentials = Credentials(me=me, token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES)
    with TcpEndpoint(credentials, EndpointOptions(tls=tls)) as endpoint:
        endpoint.meet({COORDINATOR: address})
        yield endpoint
