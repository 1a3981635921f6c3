"""Benchmark worker, `python -m gossamer.plan.bench.worker ELEMENTS`: one of two processes; commands are JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import TextIO

import torch

from gossamer.plan.bench.cases import with_feedback
from gossamer.plan.bench.replay import ReplayedExchange, prepare
from gossamer.plan.bench.workloads import bucket


def serve(elements: int, commands: TextIO, answers: TextIO) -> None:
    """{"subject": text} prepares a compressor; {"seconds": s} aggregates for s seconds and answers with the rate."""
    torch.set_num_threads(1)
    exchange: ReplayedExchange | None = None
    for line in commands:
        command = json.loads(line)
        answer: float | None = None
        if "subject" in command:
            (exchange,) = prepare(with_feedback(command["subject"]), bucket(elements), (1,))
        elif exchange is not None:
            answer = _rate(exchange, command["seconds"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _rate(exchange: ReplayedExchange, seconds: float) -> float:
    began, count, passed = time.perf_counter(), 0, 0.0
    while passed < seconds:
        exchange.run()
        count += 1
        passed = time.perf_counter() - began
    return count / passed


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.stdin, sys.stdout)
