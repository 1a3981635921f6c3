"""Script runners: over a transport, for all workers at once in this process, or only for the price."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.base import flight_recorder
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import CollectiveOp, Script
from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind, code_of
from gossamer.base.spans.recorder import SpanRecorder, mask
from gossamer.base.transport import Transport


@dataclass(frozen=True, kw_only=True)
class ScriptCost:
    """A script's result and cost. The seconds of all scripts add up to no more than their thread has spent."""

    result: Any
    encode_seconds: float  # of computing before the first operation
    wire_seconds: float  # in which the thread did nothing but begin this script's operations and wait for answers
    decode_seconds: float  # of computing after the first operation
    bytes_sent: float


class OperationUnderWay:
    """An operation under way, as the trace will show it. Made just before it begins: no part of it left earlier."""

    def __init__(self, recorder: SpanRecorder, transport: Transport, op: CollectiveOp, began: float) -> None:
        world = transport.world
        self._began, self._position = began, recorder.position(transport)
        self._about = code_of(op.names()), int(op.bytes_sent(world, transport.rank)), mask(op.sources(world), world)

    def ended(self, recorder: SpanRecorder, answered: float) -> None:
        recorder.operation(self._began, answered, self._position, *self._about)


class ScriptRun:
    """One worker's script over a transport, operation by operation."""

    def __init__(self, script: Script, transport: Transport, bucket: int = 0) -> None:
        """bucket: number of the bucket in the step that the operations belong to, from 1; 0: none."""
        self._script, self._transport, self._bucket = script, transport, bucket
        self._flight, self._noted = flight_recorder.current, flight_recorder.NOTHING
        self._current: CollectiveOp | None = None  # kept while it is under way: its tensors are the transport's
        self._answered: Callable[[], Any] | None = None  # before the first operation and after the last one
        self._result: Any = None
        self._encode = self._wire = self._decode = self._sent = 0.0
        self._under_way: OperationUnderWay | None = None  # while spans are recorded

    def advance(self) -> bool:
        """Wait for the operation under way, if there is one, and begin the next; False where none follows."""
        asked = time.perf_counter()
        self._flight.waiting = self._noted
        answer = None if self._answered is None else self._answered()
        self._flight.waiting = flight_recorder.NOTHING
        answered_at = self._noted.answered = time.perf_counter()
        self._wire += answered_at - asked
        op: CollectiveOp | None
        try:
            op = self._script.send(answer)
        except StopIteration as stop:
            op, self._result = None, stop.value
        computed = time.perf_counter()
        if self._answered is None:
            self._encode += computed - answered_at
        else:
            self._decode += computed - answered_at
        if active.recorder is not None:
            self._record(active.recorder, asked, answered_at, computed, op)
        if op is None:
            self._current = self._answered = None
            return False
        nbytes = op.bytes_sent(self._transport.world, self._transport.rank)
        self._noted = self._flight.begin(self._transport, op.names(), nbytes, computed, self._bucket)
        self._flight.waiting = self._noted  # a transport may need others to begin
        self._current, self._answered = op, self._transport.begin(op)
        self._flight.waiting = flight_recorder.NOTHING
        self._wire += time.perf_counter() - computed
        self._sent += nbytes
        return True

    def _record(
        self, recorder: SpanRecorder, asked: float, answered_at: float, computed: float, op: CollectiveOp | None
    ) -> None:
        """Record the spans of this thread since it requested the last answer; `op` begins now."""
        if self._under_way is not None:
            recorder.add(SpanKind.WIRE, asked, answered_at)
            self._under_way.ended(recorder, answered_at)
            recorder.add(SpanKind.DECODE, answered_at, computed)
        else:
            recorder.add(SpanKind.ENCODE, answered_at, computed)
        self._under_way = None if op is None else OperationUnderWay(recorder, self._transport, op, computed)

    @property
    def performed(self) -> ScriptCost:
        """Its costs so far, and its result once it has ended."""
        return ScriptCost(
            result=self._result,
            encode_seconds=self._encode,
            wire_seconds=self._wire,
            decode_seconds=self._decode,
            bytes_sent=self._sent,
        )


def run_script(script: Script, transport: Transport) -> ScriptCost:
    """Run one worker's script over a transport."""
    performance = ScriptRun(script, transport)
    while performance.advance():
        pass
    return performance.performed


def broadcast(transport: Transport, tensors: Sequence[Tensor], source: int) -> ScriptCost:
    """Overwrite tensors with those of `source`; each is sent once to every other rank, on average (n-1)/n a worker."""
    asked = time.perf_counter()
    with flight_recorder.current.call(transport, "broadcast"):
        transport.broadcast_(tensors, source)
    sent = sum(tensor.nbytes for tensor in tensors) * (transport.world - 1) / transport.world
    wire = (answered := time.perf_counter()) - asked
    if active.recorder is not None:
        active.recorder.add(SpanKind.WIRE, asked, answered)
    return ScriptCost(result=None, encode_seconds=0.0, wire_seconds=wire, decode_seconds=0.0, bytes_sent=sent)


def simulate(scripts: Sequence[Script]) -> list[Any]:
    """Run one script per worker in lock step, in this thread; returns their results by rank."""
    asked: list[CollectiveOp] = []
    results: list[Any] = []
    replies: Sequence[Any] = [None] * len(scripts)
    while not results:
        asked = []
        for script, reply in zip(scripts, replies, strict=True):
            try:
                asked.append(script.send(reply))
            except StopIteration as stop:
                results.append(stop.value)
        if asked:
            replies = answer_all(asked)
    if len(results) != len(scripts):
        raise AssertionError(
            f"{len(results)} of {len(scripts)} workers ended while the others still asked for operations"
        )
    return results


@dataclass(frozen=True)
class OpCost:
    """One operation and the payload bytes that one worker sends to have it answered."""

    op: str
    bytes_sent: float


def price(script: Script, world: int, rank: int = 0) -> list[OpCost]:
    """The operations that a script over meta tensors would ask for, and their bytes, without performing them."""
    costs: list[OpCost] = []
    answer: Any = None
    while True:
        try:
            op = script.send(answer)
        except StopIteration:
            return costs
        costs += [OpCost(each.label, each.bytes_sent(world, rank)) for each in op.concurrent()]
        answer = op.meta_answer(world, rank)
