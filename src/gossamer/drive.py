"""The ways to run scripts: over a transport, for all workers at once in this process, or only to know their cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.transports.base import Transport
from gossamer.transports.simulated import answers, meta_answer
from gossamer.words import Script, Together, Word, bytes_sent


@dataclass(frozen=True, kw_only=True)
class Performed:
    """A script's result and what it took: seconds before the first word, within words, and after; bytes sent."""

    result: Any
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    bytes_sent: float


def perform(script: Script, transport: Transport) -> Performed:
    """Run one worker's script over a transport."""
    spent = {"encode": 0.0, "wire": 0.0, "decode": 0.0}
    sent, phase, answer = 0.0, "encode", None
    mark = time.perf_counter()
    while True:
        try:
            word = script.send(answer)
        except StopIteration as stop:
            spent[phase] += time.perf_counter() - mark
            return Performed(
                result=stop.value,
                encode_seconds=spent["encode"],
                wire_seconds=spent["wire"],
                decode_seconds=spent["decode"],
                bytes_sent=sent,
            )
        asked = time.perf_counter()
        spent[phase] += asked - mark
        answer = transport.answer(word)
        mark = time.perf_counter()
        spent["wire"] += mark - asked
        sent += bytes_sent(word, transport.world, transport.rank)
        phase = "decode"


def broadcast(transport: Transport, tensors: Sequence[Tensor], source: int) -> Performed:
    """Overwrite tensors with those of `source`; each is sent once to every other rank, on average (n-1)/n a worker."""
    asked = time.perf_counter()
    transport.broadcast_(tensors, source)
    sent = sum(tensor.nbytes for tensor in tensors) * (transport.world - 1) / transport.world
    wire = time.perf_counter() - asked
    return Performed(result=None, encode_seconds=0.0, wire_seconds=wire, decode_seconds=0.0, bytes_sent=sent)


def simulate(scripts: Sequence[Script]) -> list[Any]:
    """Run one script per worker in lock step, in this thread; returns their results by rank."""
    asked: list[Word] = []
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
            replies = answers(asked)
    if len(results) != len(scripts):
        raise AssertionError(f"{len(results)} of {len(scripts)} workers ended while the others still spoke")
    return results


@dataclass(frozen=True)
class Priced:
    """One word and the payload bytes that one worker sends to have it answered."""

    word: str
    bytes_sent: float


def price(script: Script, world: int, rank: int = 0) -> list[Priced]:
    """What a script over meta tensors would say and send, without doing it."""
    said: list[Priced] = []
    answer: Any = None
    while True:
        try:
            word = script.send(answer)
        except StopIteration:
            return said
        each = word.words if isinstance(word, Together) else (word,)
        said.extend(Priced(type(one).__name__, bytes_sent(one, world, rank)) for one in each)
        answer = meta_answer(word, world, rank)
