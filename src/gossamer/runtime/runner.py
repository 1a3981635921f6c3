"""Script runners: over a transport, for all workers at once in this process, or only for the price."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.core.op_semantics import answer_all
from gossamer.core.ops import CollectiveOp, Script
from gossamer.runtime.transport import Transport


@dataclass(frozen=True, kw_only=True)
class ScriptCost:
    """A script's result and cost. The seconds of all scripts add up to no more than their thread has spent."""

    result: Any
    encode_seconds: float  # of computing before the first operation
    wire_seconds: float  # in which the thread did nothing but begin this script's operations and wait for answers
    decode_seconds: float  # of computing after the first operation
    bytes_sent: float


class ScriptRun:
    """One worker's script over a transport, operation by operation."""

    def __init__(self, script: Script, transport: Transport) -> None:
        self._script, self._transport = script, transport
        self._said: CollectiveOp | None = None  # kept while it is under way: its tensors are the transport's
        self._answered: Callable[[], Any] = _nothing
        self._result: Any = None
        self._encode = self._wire = self._decode = self._sent = 0.0

    def advance(self) -> bool:
        """Wait for the operation under way, if there is one, and begin the next; False where none follows."""
        asked = time.perf_counter()
        answer = self._answered()
        heard = time.perf_counter()
        self._wire += heard - asked
        try:
            op = self._script.send(answer)
        except StopIteration as stop:
            self._compute(time.perf_counter() - heard)
            self._said, self._answered, self._result = None, _nothing, stop.value
            return False
        computed = time.perf_counter()
        self._compute(computed - heard)
        self._said, self._answered = op, self._transport.begin(op)
        self._wire += time.perf_counter() - computed
        self._sent += op.bytes_sent(self._transport.world, self._transport.rank)
        return True

    def _compute(self, seconds: float) -> None:
        if self._answered is _nothing:
            self._encode += seconds
        else:
            self._decode += seconds

    @property
    def performed(self) -> ScriptCost:
        """What it took so far, and its result once it has ended."""
        return ScriptCost(
            result=self._result,
            encode_seconds=self._encode,
            wire_seconds=self._wire,
            decode_seconds=self._decode,
            bytes_sent=self._sent,
        )


def _nothing() -> None:
    """The answer that a script is started with."""


def run_script(script: Script, transport: Transport) -> ScriptCost:
    """Run one worker's script over a transport."""
    performance = ScriptRun(script, transport)
    while performance.advance():
        pass
    return performance.performed


def broadcast(transport: Transport, tensors: Sequence[Tensor], source: int) -> ScriptCost:
    """Overwrite tensors with those of `source`; each is sent once to every other rank, on average (n-1)/n a worker."""
    asked = time.perf_counter()
    transport.broadcast_(tensors, source)
    sent = sum(tensor.nbytes for tensor in tensors) * (transport.world - 1) / transport.world
    wire = time.perf_counter() - asked
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
    said: list[OpCost] = []
    answer: Any = None
    while True:
        try:
            op = script.send(answer)
        except StopIteration:
            return said
        said += [OpCost(each.label, each.bytes_sent(world, rank)) for each in op.concurrent()]
        answer = op.meta_answer(world, rank)
