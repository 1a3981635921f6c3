"""Run files: reports that a run's processes write for each other, one file per kind, rank and attempt."""

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
NETWORK_NAMESPACE = "GOSSAMER_NETWORK_NAMESPACE"  # file of the namespace of a process on an emulated host


class Stage(StrEnum):
    """Stages of a worker, in order: three before its first step, and optional ones."""

    ENTERED = "entered"  # imports are done, and the script begins
    JOINED = "joined"  # joined the group of all workers
    ATTACHED = "attached"
    OTHERWISE = "otherwise"  # trains without a session, for instance with remote modules
    CALLED = "called"  # called gossamer.mean, gather or average_ outside of a session
    LEFT = "left"  # left a run that continues without it: no error, and not the end of training


@dataclass(frozen=True)
class RunFiles:
    """The files of a run's directory. Attempts count from 0: the first start, then one more after every restart."""

    directory: Path

    def output(self, rank: int, attempt: int) -> Path:
        """The worker's stdout and stderr in one file, which preserves their order."""
        return self.directory / f"output-{attempt}-{rank}.txt"

    def boot(self, rank: int, attempt: int) -> Path:
        """The worker's stderr before its two streams are joined."""
        return self.directory / f"boot-{attempt}-{rank}.txt"

    def started(self, rank: int, attempt: int) -> Path:
        return self.directory / f"started-{attempt}-{rank}.json"

    def report_start(self, rank: int, attempt: int, pid: int) -> None:
        """Report the process to the launcher and to fault injection."""
        report = {"pid": pid, "host": socket.gethostname(), "moment": time.time()}
        write_json(self.started(rank, attempt), report)

    def newest_start(self, rank: int) -> dict[str, Any] | None:
        """Return the start report of the rank's latest attempt; None before the first."""
        attempt = self._newest_attempt(rank)
        return None if attempt is None else read_json(self.started(rank, attempt))

    def living(self) -> list[tuple[int, int]]:
        """Return number and process id of each process that was started and has no exit report."""
        found = []
        for path in self.directory.glob("started-*-*.json"):
            attempt, number = (int(word) for word in path.stem.split("-")[1:])
            report = None if self.exited(number, attempt).exists() else read_json(path)
            if report is not None:
                found.append((number, report["pid"]))
        return found

    def mark(self, stage: Stage, rank: int, attempt: int) -> None:
        """Report the worker's stage to the launcher."""
        self._mark(stage, rank, attempt).touch()

    def has_reached(self, stage: Stage, rank: int) -> bool:
        """Whether the rank's latest attempt has reached the stage."""
        attempt = self._newest_attempt(rank)
        return attempt is not None and self._mark(stage, rank, attempt).exists()

    def has_ever_reached(self, stage: Stage, rank: int) -> bool:
        """Whether any of the rank's attempts has reached the stage."""
        return any(self.directory.glob(f"{stage}-*-{rank}"))

    @property
    def stopping(self) -> Path:
        """Exists before workers receive a signal because the launcher did: all are stopped, not one alone."""
        return self.directory / "stopping"

    @property
    def interrupted(self) -> Path:
        """Exists before workers receive SIGINT because the launcher did."""
        return self.directory / "interrupted"

    def finished(self, rank: int, attempt: int) -> Path:
        """Exists after the script has ended successfully."""
        return self.directory / f"finished-{attempt}-{rank}.json"

    def residual(self, rank: int, attempt: int) -> Path:
        """The last report of a worker of an elastic run about its residuals."""
        return self.directory / f"residual-{attempt}-{rank}.json"

    def exited(self, number: int, attempt: int) -> Path:
        """Exists after the launcher has seen the process end."""
        return self.directory / f"exited-{attempt}-{number}.json"

    @property
    def launcher_messages(self) -> Path:
        """Messages of the launcher, a line of JSON each."""
        return self.directory / "launcher.jsonl"

    def failure(self, rank: int, attempt: int) -> Path:
        return self.directory / f"failure-{attempt}-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """The file for the Python stacks of this process, a worker, on request."""
        return self.directory / f"stacks-{rank}-{os.getpid()}.txt"

    def all_stacks(self) -> list[Path]:
        """Return the stack files of all ranks and processes."""
        return sorted(self.directory.glob("stacks-*-*.txt"))

    def all_flights(self) -> list[Path]:
        """Return each rank's file of latest operations, written when it stalled or ended."""
        return sorted(self.directory.glob("flight-*.json"))

    def stalled(self, rank: int) -> Path:
        """Touched whenever the rank reports a long wait."""
        return self.directory / f"stalled-{rank}"

    def all_stalled(self) -> list[Path]:
        return sorted(self.directory.glob("stalled-*"))

    def _newest_attempt(self, rank: int) -> int | None:
        return max(
            (int(path.name.split("-")[1]) for path in self.directory.glob(f"started-*-{rank}.json")), default=None
        )

    def _mark(self, stage: Stage, rank: int, attempt: int) -> Path:
        return self.directory / f"{stage}-{attempt}-{rank}"


def current_attempt() -> int:
    """Number of earlier starts of this worker."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically, even if another process writes it at the same time: both report a worker's start."""
    bounded_file.write_whole(path, json.dumps(content))


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(bounded_file.read_text(path))
    except FileNotFoundError:
        return None
    return content
