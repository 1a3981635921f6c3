"""Step results: outcome, bytes and seconds of a worker's step, and the totals at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.train.parameter_server.shard_spec import Options


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Outcome of one step."""

    step: int
    applied: tuple[int, ...]  # by server, the version that the gradients made; -1 if they were late
    versions: tuple[int, ...]  # by server, current version of the replica
    bytes_sent: int  # payload, to servers in other processes
    bytes_received: int
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    finite: bool  # False if a gradient was not finite, so that no gradient was sent


class RunTotals(NamedTuple):
    """Number of contributions at the server with the largest number of them."""

    applied: int
    late: int  # arrived too late to be applied
    staleness: Mapping[int, int]  # number of contributions by age in versions
    missed: bool  # whether this worker was disconnected when the others ended, so that its last ones were not applied
    samples: float = 0.0  # sum of the weights of applied contributions


class GatheredStep(NamedTuple):
    """A step to be pushed, except its gradients."""

    options: tuple[Options, ...]  # hyperparameters by the optimizer's groups
    weight: float
    known: tuple[int, ...]  # by server, the version at which the gradients were computed


class SentStep(NamedTuple):
    """A step after its pushes were answered."""

    step: int
    applied: tuple[int, ...]  # as in StepResult
    bytes_sent: int


class StepTimer:
    """Seconds that one step spends encoding, on the wire and decoding."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._spent = {"encode_seconds": 0.0, "wire_seconds": 0.0, "decode_seconds": 0.0}
        self._mark = time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        if active.recorder is not None:
            active.recorder.add(SpanKind[what.upper()], self._mark, now)
        self._spent[f"{what}_seconds"] += now - self._mark
        self._mark = now

    def seconds(self) -> dict[str, float]:
        return self._spent
