"""What became of a worker's step, and what it took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gossamer.parameter_server.shard_spec import Options


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What became of one step. applied: by server, the version it was applied to become, -1 where it came too late.

    versions: by server, of the parameters that are here now; bytes_sent, bytes_received: payload to and from servers in
    other processes; finite: False where the gradients held a number that cannot be sent, so that none was.
    """

    step: int
    applied: tuple[int, ...]
    versions: tuple[int, ...]
    bytes_sent: int
    bytes_received: int
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    finite: bool


class Told(NamedTuple):
    """Of the server that has most to tell: contributions that were applied, that came too late, and by their age."""

    applied: int
    late: int
    staleness: Mapping[int, int]


class Gathered(NamedTuple):
    """What is to be pushed: the optimizer's groups and the weight, and by server which version the gradients are of."""

    options: tuple[Options, ...]
    weight: float
    known: tuple[int, ...]


class Stopwatch:
    """Seconds that one step spent encoding, on the wire and decoding."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._spent = {"encode_seconds": 0.0, "wire_seconds": 0.0, "decode_seconds": 0.0}
        self._mark = time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self._spent[f"{what}_seconds"] += now - self._mark
        self._mark = now

    def seconds(self) -> dict[str, float]:
        return self._spent
