"""A made-up run in a store: ranks and machines with metrics, vitals, logs, links, tensors, a straggler, a failure."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.observe.telemetry import insert, open_store

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """`ranks` ranks, `per_machine` on each machine, make `steps` steps; one computes slowly, one fails at the end.

    began: unix seconds. vital_every: steps between samples. ended: whether the run says that it has failed.
    """

    ranks: int = 4
    steps: int = 60
    per_machine: int = 2
    step_seconds: float = 0.2
    began: float = 1_800_000_000.0
    straggler: int = 1
    fails: int | None = 2
    vital_every: int = 5
    ended: bool = True

    def machine(self, rank: int) -> str:
        return f"machine-{rank // self.per_machine}"

    @property
    def machines(self) -> list[str]:
        return sorted({self.machine(rank) for rank in range(self.ranks)})

    def at(self, step: int) -> float:
        """When a step had ended, in unix seconds; the first begins a second after the run did."""
        return self.began + 1.0 + step * self.step_seconds


def fill(path: Path, run: SyntheticRun) -> Path:
    """Write the run into a new store at `path`, which may be a folder of logs; returns the store's path."""
    file = path / "run.sqlite" if path.is_dir() else path
    db = open_store(file)
    with db:
        for table, rows in _tables(run).items():
            insert(db, table, rows)
    db.close()
    return file


def extend(db: sqlite3.Connection, run: SyntheticRun, first: int, last: int) -> None:
    """Add the steps first..last, with what they log, as if the run were going on."""
    with db:
        insert(db, "step", _steps(run, range(first, last + 1)))
        insert(db, "metric", _metrics(run, range(first, last + 1)))


def _tables(run: SyntheticRun) -> dict[str, Rows]:
    steps = range(1, run.steps + 1)
    return {
        "run": _run(run),
        "rank": _ranks(run),
        "step": _steps(run, steps),
        "metric": _metrics(run, steps),
        "vital": _vitals(run),
        "tensor": _tensors(run),
        "link": _links(run),
        "log": _logs(run),
        "failure": _failures(run),
        "event": _events(run),
        "finding": _findings(run),
    }


def _run(run: SyntheticRun) -> Rows:
    told = {
        "recipe": "EveryStep() + TopK(density=0.01) + Ring()",
        "workers": run.ranks,
        "script": "train.py --width 256",
        "machine": run.machines[0],
        "started": run.began,
        "parameters": 3_307_264,
        "versions": {"gossamer": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "network": "100mbit,20ms",
        "estimated_seconds_per_step": 0.9 * run.step_seconds,
        "estimated_interval": {
            "low_seconds": 0.8 * run.step_seconds,
            "high_seconds": 1.1 * run.step_seconds,
            "coverage": 0.8,
        },
        "estimated_for": {"recipe": "TopK(0.01)", "workers": run.ranks, "network": "100mbit,20ms"},
    }
    over = {"ended": run.at(run.steps) + 1, "how": "finished" if run.fails is None else "failed"}
    for key, value in (told | over if run.ended else told).items():
        yield {"key": key, "value": json.dumps(value)}


def _ranks(run: SyntheticRun) -> Rows:
    for rank in range(run.ranks):
        state = "failed" if rank == run.fails else "finished" if run.ended else "training"
        yield {
            "rank": rank,
            "attempt": 0,
            "machine": run.machine(rank),
            "pid": 4000 + rank,
            "began": run.began,
            "ended": run.at(run.steps) + 0.5 if run.ended or rank == run.fails else None,
            "state": state,
            "waits_for": None,
            "clock_offset": 0.0 if run.machine(rank) == run.machines[0] else 0.013,
            "clock_error": 0.0 if run.machine(rank) == run.machines[0] else 0.0004,
            "environment": json.dumps({"torch": "2.13.0", "python": "3.11.2"}),
        }


def _steps(run: SyntheticRun, steps: range) -> Rows:
    """Everyone's step takes equally long, since all wait for the straggler, who alone does not."""
    for step in steps:
        for rank in range(run.ranks):
            slow = rank == run.straggler
            compute = (0.75 if slow else 0.45) * run.step_seconds
            data = 0.05 * run.step_seconds
            yield {
                "rank": rank,
                "step": step,
                "at": run.at(step) + 0.0001 * rank,
                "steps": 1,
                "seconds": run.step_seconds,
                "compute": compute,
                "encode": 0.02 * run.step_seconds,
                "wire": 0.15 * run.step_seconds,
                "decode": 0.01 * run.step_seconds,
                "waiting": run.step_seconds - compute - data,
                "data": data,
                "bytes_sent": 264_000.0,
                "bytes_pulled": 0.0,
                "skipped": int(step == 7),
            }


def _metrics(run: SyntheticRun, steps: range) -> Rows:
    for step in steps:
        for rank in range(run.ranks):
            value = 2.0 * math.exp(-step / 40) + 0.5 + 0.02 * math.sin(step + rank)
            yield _metric(run, "loss", step, rank, None if step == 7 else value)
        if step % 20 == 0:
            yield _metric(run, "validation_loss", step, 0, 2.1 * math.exp(-step / 40) + 0.55)


def _metric(run: SyntheticRun, name: str, step: int, rank: int, value: float | None) -> dict[str, Any]:
    return {"name": name, "step": step, "at": run.at(step), "rank": rank, "value": value}


def _vitals(run: SyntheticRun) -> Rows:
    for step in range(run.vital_every, run.steps + 1, run.vital_every):
        at = run.at(step)
        for machine in run.machines:
            loaded = 0.6 * math.sin(step / 9) ** 2
            for name, value in {
                "load": 1.5 + loaded,
                "memory": 6.2e9 + 1e6 * step,
                "steal": 0.01,
                "throttled": 0.0,
                "sent": 2.1e6,
                "received": 2.0e6,
                "retransmits": 0.2,
            }.items():
                yield {"machine": machine, "rank": None, "at": at, "name": name, "value": value}
        for rank in range(run.ranks):
            for name, value in {"cpu_share": 0.9, "rss": 4e8 + 1e5 * step, "gc_seconds": 0.002}.items():
                yield {"machine": run.machine(rank), "rank": rank, "at": at, "name": name, "value": value}


def _tensors(run: SyntheticRun) -> Rows:
    shapes = {"embedding.weight": 786_432, "layers.0.weight": 65_536, "layers.0.bias": 256, "head.weight": 786_432}
    for step in range(10, run.steps + 1, 10):
        for rank in range(run.ranks):
            for name, numel in shapes.items():
                yield {
                    "rank": rank,
                    "step": step,
                    "name": name,
                    "numel": numel,
                    "bytes": 0.08 * numel,
                    "residual_norm": 0.01 * math.sqrt(numel),
                    "gradient_norm": 0.004 * math.sqrt(numel),
                    "energy_share": 0.7,
                }


def _links(run: SyntheticRun) -> Rows:
    for step in range(10, run.steps + 1, 10):
        for source in range(run.ranks):
            for target in range(run.ranks):
                if source != target:
                    apart = run.machine(source) != run.machine(target)
                    yield {
                        "source": source,
                        "target": target,
                        "at": run.at(step),
                        "round_trip": 0.0201 if apart else 0.0001,
                        "bytes_per_second": 1.2e7 if apart else 2e9,
                        "used_bytes": 880_000.0,
                        "retransmits": 2.0 if apart and step % 20 == 0 else 0.0,
                    }


def _logs(run: SyntheticRun) -> Rows:
    yield _line(run.began, None, "launcher", "info", f"{run.ranks} workers start")
    for rank in range(run.ranks):
        yield _line(run.began + 0.5, rank, "stdout", "info", f"rank {rank} reads <b>data</b> & begins")
        for step in range(20, run.steps + 1, 20):
            yield _line(run.at(step), rank, "stdout", "info", f"step {step} done")
    yield _line(run.at(7), 0, "stdout", "warning", "UserWarning: the loss is not finite")
    if run.fails is not None:
        for text in ("Traceback (most recent call last):", "RuntimeError: out of memory </script><b>!"):
            yield _line(run.at(run.steps) + 0.4, run.fails, "stdout", "error", text)


def _line(at: float, rank: int | None, stream: str, level: str, text: str) -> dict[str, Any]:
    attempt = None if rank is None else 0
    return {"at": at, "rank": rank, "attempt": attempt, "stream": stream, "level": level, "text": text}


def _failures(run: SyntheticRun) -> Rows:
    if run.fails is None:
        return
    text = 'Traceback (most recent call last):\n  File "train.py", line 31, in <module>\nRuntimeError: out of memory\n'
    yield {
        "at": run.at(run.steps) + 0.4,
        "rank": run.fails,
        "attempt": 0,
        "kind": "raised",
        "message": "RuntimeError: out of memory </script><b>!",
        "traceback": text,
        "caused_by": None,
    }
    for rank in range(run.ranks):
        if rank != run.fails:
            yield {
                "at": run.at(run.steps) + 0.5,
                "rank": rank,
                "attempt": 0,
                "kind": "echo",
                "message": f"PeerLost: rank {run.fails} is gone",
                "traceback": "",
                "caused_by": run.fails,
            }


def _events(run: SyntheticRun) -> Rows:
    told: list[tuple[float, int | None, str, dict[str, Any]]] = [
        *(
            (run.began + 0.8, rank, "attached", {"world": run.ranks, "parameters": 3_307_264})
            for rank in range(run.ranks)
        ),
        (run.at(1), 0, "collective", {"nbytes": 264_000, "collective": "Ring()"}),
        (run.at(7), 0, "skipped", {"step": 7, "rank": 1, "tensor": "head.weight", "scaled": False}),
        (run.at(10), 0, "noticed", {"message": "The network is slower than estimated."}),
        (run.at(run.steps // 2), 0, "saved", {"step": run.steps // 2, "directory": "checkpoints/run"}),
    ]
    for at, rank, kind, content in told:
        yield {"at": at, "rank": rank, "kind": kind, "content": json.dumps(content)}


def _findings(run: SyntheticRun) -> Rows:
    evidence = f"rank {run.straggler} computes 1.7 times as long as the others <script>alert(1)</script>"
    step = min(30, run.steps)
    yield {"at": run.at(step), "step": step, "rank": run.straggler, "cause": "computing", "evidence": evidence}
