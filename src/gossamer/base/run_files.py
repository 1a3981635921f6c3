"""Run files: hold the reports that a run's processes leave for each other, one file per kind, rank and attempt."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gossamer.base import bounded_file

RUN_DIRECTORY = "GOSSAMER_RUN_DIRECTORY"


class Stage(StrEnum):
    """Stages of a worker, in order: three before its first step, and some that few reach."""

    ENTERED = "entered"  # it has imported what it needs, and the script begins
    JOINED = "joined"  # the group of all workers
    ATTACHED = "attached"
    OTHERWISE = "otherwise"  # it trains by means that need no session, such as remote modules
    CALLED = "called"  # gossamer.mean, gather or average_ outside of a session
    LEFT = "left"  # a run that goes on without it: no error, and not the end of training


@dataclass(frozen=True)
class RunFiles:
    """Attempts count from 0: the first start, then one more after every restart."""

    directory: Path

    def output(self, rank: int, attempt: int) -> Path:
        """The worker's stdout and stderr in one file, so that their order is kept."""
        return self.directory / f"output-{attempt}-{rank}.txt"

    def boot(self, rank: int, attempt: int) -> Path:
        """The worker's stderr before it has joined its two streams."""
        return self.directory / f"boot-{attempt}-{rank}.txt"

    def started(self, rank: int, attempt: int) -> Path:
        return self.directory / f"started-{attempt}-{rank}.json"

    def report_start(self, rank: int, attempt: int, pid: int) -> None:
        """Tell the launcher and fault injection where the process is."""
        report = {"pid": pid, "host": socket.gethostname(), "moment": time.time()}
        write_json(self.started(rank, attempt), report)

    def newest_start(self, rank: int) -> dict[str, Any] | None:
        """The start report of the rank's latest attempt; None before the first."""
        attempt = self._newest_attempt(rank)
        return None if attempt is None else read_json(self.started(rank, attempt))

    def living(self) -> list[tuple[int, int]]:
        """Number and process id of each process that was started and has no exit report."""
        found = []
        for path in self.directory.glob("started-*-*.json"):
            attempt, number = (int(word) for word in path.stem.split("-")[1:])
            report = None if self.exited(number, attempt).exists() else read_json(path)
            if report is not None:
                found.append((number, report["pid"]))
        return found

    def mark(self, stage: Stage, rank: int, attempt: int) -> None:
        """Tell the launcher how far the worker is."""
        self._mark(stage, rank, attempt).touch()

    def has_reached(self, stage: Stage, rank: int) -> bool:
        """Whether the rank's latest attempt is as far."""
        attempt = self._newest_attempt(rank)
        return attempt is not None and self._mark(stage, rank, attempt).exists()

    def has_ever_reached(self, stage: Stage, rank: int) -> bool:
        """Whether any of the rank's attempts has come as far."""
        return any(self.directory.glob(f"{stage}-*-{rank}"))

    @property
    def stopping(self) -> Path:
        """There before any worker is sent a signal because the launcher was: all are asked, not this one alone."""
        return self.directory / "stopping"

    @property
    def interrupted(self) -> Path:
        """There before any worker is sent SIGINT because the launcher was."""
        return self.directory / "interrupted"

    def finished(self, rank: int, attempt: int) -> Path:
        """There once the script has ended well."""
        return self.directory / f"finished-{attempt}-{rank}.json"

    def residual(self, rank: int, attempt: int) -> Path:
        """What a worker of an elastic run last told of what it had still to send."""
        return self.directory / f"residual-{attempt}-{rank}.json"

    def exited(self, number: int, attempt: int) -> Path:
        """There once the launcher has seen the process end."""
        return self.directory / f"exited-{attempt}-{number}.json"

    @property
    def told(self) -> Path:
        """What the launcher has to say, a line of JSON each."""
        return self.directory / "launcher.jsonl"

    def failure(self, rank: int, attempt: int) -> Path:
        return self.directory / f"failure-{attempt}-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Where this process, a worker, writes its Python stacks when it is asked."""
        return self.directory / f"stacks-{rank}-{os.getpid()}.txt"

    def all_stacks(self) -> list[Path]:
        """Of all ranks and processes."""
        return sorted(self.directory.glob("stacks-*-*.txt"))

    def all_flights(self) -> list[Path]:
        """Of each rank, its latest operations, as it wrote them when it stood still or ended."""
        return sorted(self.directory.glob("flight-*.json"))

    def stalled(self, rank: int) -> Path:
        """Touched whenever the rank has told that it waits for long."""
        return self.directory / f"stalled-{rank}"

    def all_stalled(self) -> list[Path]:
        return sorted(self.directory.glob("stalled-*"))

    def _newest_attempt(self, rank: int) -> int | None:
        return max(
            (int(path.name.split("-")[1]) for path in self.directory.glob(f"started-*-{rank}.json")), default=None
        )

    def _mark(self, stage: Stage, rank: int, attempt: int) -> Path:
        return self.directory / f"{stage}-{attempt}-{rank}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Readers find the whole file or none."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    os.replace(draft, path)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(bounded_file.read_text(path))
    except FileNotFoundError:
        return None
    return content
