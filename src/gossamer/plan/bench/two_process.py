"""Two-process benchmark: aggregations per second of one process alone, and of two at once."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gossamer.errors import GossamerError
from gossamer.plan.bench.interleave import spread


class BenchError(GossamerError, RuntimeError):
    """A benchmark process ended too early."""


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """Aggregations per second, by round."""

    subject: str
    alone: tuple[float, ...]  # of one process
    together: tuple[float, ...]  # of two at once, summed
    gain: float  # median of together / alone
    spread: float  # of that ratio


def run_pair_benchmark(
    subjects: Sequence[str], elements: int, rounds: int, seconds: float, tick: Callable[[str], None]
) -> list[PairResult]:
    """Alone and together in turn, for `seconds` each per round; the first round is a warm-up."""
    found: list[PairResult] = []
    with _worker(elements) as first, _worker(elements) as second:
        for subject in subjects:
            tick(subject)
            for worker in (first, second):
                worker.send({"subject": subject})
            for worker in (first, second):
                worker.receive()
            pairs = [(_rate([first], seconds), _rate([first, second], seconds)) for _ in range(rounds + 1)][1:]
            gains = [together / alone for alone, together in pairs]
            found.append(
                PairResult(
                    subject=subject,
                    alone=tuple(alone for alone, _ in pairs),
                    together=tuple(together for _, together in pairs),
                    gain=statistics.median(gains),
                    spread=spread(gains),
                )
            )
    return found


@dataclass(frozen=True)
class _RemoteWorker:
    process: subprocess.Popen[str]

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchError(
                f"A benchmark process ended with {self.process.wait()}, so there is no result; its error is above. If "
                "memory ran out, use fewer elements: --elements 1000000."
            )
        return json.loads(line)


@contextmanager
def _worker(elements: int) -> Iterator[_RemoteWorker]:
    command = [sys.executable, "-m", "gossamer.plan.bench.worker", str(elements)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with process:
        try:
            yield _RemoteWorker(process)
        finally:
            process.kill()


def _rate(workers: Sequence[_RemoteWorker], seconds: float) -> float:
    """Aggregations per second of all workers together."""
    for worker in workers:
        worker.send({"seconds": seconds})
    return float(sum(worker.receive() for worker in workers))
