"""Elastic runs under a driver: starts one, ends its workers, and reads afterwards what each process did and when."""

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import ROOT

STOP = "stop"  # the file that ends a run, as benchmarks/elastic_worker.py knows it
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 120.0
SAID = 3000  # last characters of what a failed run said


class Step(NamedTuple):
    """A committed step, as one process wrote it down."""

    number: int
    moment: float  # monotonic seconds, of the whole machine
    loss: float
    size: int  # workers
    rank: int
    megabytes: float  # resident
    files: int  # open


@dataclass(frozen=True)
class WorkerProcess:
    """One process of a run: its place, its steps, and what it found at its end, if it came to that."""

    place: int
    pid: int
    steps: Sequence[Step]
    end: dict[str, Any] | None

    @property
    def lives(self) -> bool:
        """Whether it is there, and no zombie."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    def longest_gap(self, begin: float, end: float) -> float | None:
        """The longest seconds between two of its steps, one of them inside; None for who was not there all the time."""
        if not self.steps or self.steps[0].moment > begin or self.steps[-1].moment < end:
            return None
        moments = [step.moment for step in self.steps]
        inside = (late - early for early, late in pairwise(moments) if late > begin and early < end)
        return max(inside, default=None)


def read(folder: Path) -> list[WorkerProcess]:
    """All processes that wrote there, in the order in which they began."""
    found = []
    for path in folder.glob("*.steps"):
        place, pid = map(int, path.stem.split("-"))
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        steps = [Step(int(a), float(b), float(c), int(d), int(e), float(f), int(g)) for a, b, c, d, e, f, g in lines]
        result = path.with_suffix(".json")
        end = json.loads(result.read_text()) if result.exists() else None
        found.append(WorkerProcess(place, pid, steps, end))
    return sorted(found, key=lambda each: each.steps[0].moment if each.steps else float("inf"))


def committed(processes: Sequence[WorkerProcess]) -> dict[int, float]:
    """When each step was first made by anybody, by its number."""
    moments: dict[int, float] = {}
    for each in processes:
        for step in each.steps:
            moments[step.number] = min(step.moment, moments.get(step.number, step.moment))
    return moments


def rate(moments: Sequence[float], begin: float, end: float) -> float:
    """Steps a second within an interval."""
    return sum(begin < each <= end for each in moments) / (end - begin)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the least and the most where there is more than one."""
    if not values:
        return ""
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else middle


class DrivenRun:
    """A running command, what it says and when, and its workers by what they write into `folder`."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.command, self.folder = command, folder
        self.said: list[tuple[float, str]] = []
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        settings = None if environment is None else {**os.environ, **environment}
        self.process = subprocess.Popen(command, cwd=ROOT, env=settings, **pipes)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append((time.monotonic(), line.rstrip()))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.said)

    def training(self) -> dict[int, WorkerProcess]:
        """The processes that live and have made steps, by place."""
        return {each.place: each for each in read(self.folder) if each.steps and each.lives}

    def check(self) -> None:
        """Raises SystemExit where the command has ended."""
        if self.process.poll() is not None:
            self._listener.join(1.0)
            raise SystemExit(f"{shlex.join(self.command)} ended with {self.process.returncode}:\n{self.text[-SAID:]}")

    def wait_for(self, workers: int, steps: int = 5) -> None:
        """Until so many workers train, and have made some steps."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(len(each.steps) >= steps for each in self.training().values()) < workers:
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"{workers} workers did not train within {PATIENCE_SECONDS:g} s:\n{self.text[-SAID:]}")
            time.sleep(POLL_SECONDS)

    def sleep(self, seconds: float) -> None:
        """Time passes, and the run with it."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, POLL_SECONDS * 4))

    def kill(self, worker: WorkerProcess) -> float:
        """SIGKILL; when."""
        os.kill(worker.pid, signal.SIGKILL)
        return time.monotonic()

    def stop(self) -> int:
        """Let the workers end after the same step. Returns the exit code, 124 where they did not end in time."""
        (self.folder / STOP).touch()
        return self.wait(PATIENCE_SECONDS)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            self._listener.join(1.0)

    def held(self) -> tuple[float, int]:
        """Resident megabytes and open files of the command itself: the launcher, with the coordinator."""
        about = Path(f"/proc/{self.process.pid}")
        pages = int((about / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 1e6, len(os.listdir(about / "fd"))

    def end(self) -> None:
        """By force, where it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGTERM)  # the second ends at once
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(20)
                self.process.kill()
        self.process.wait()
        self._listener.join(1.0)


def command(
    workers: str, options: Sequence[str], logs: Path, script: Sequence[str], program: str = "elastic_worker.py"
) -> list[str]:
    gossamer = [sys.executable, "-m", "gossamer", "run", "--workers", workers, "--logs", str(logs), *options]
    return [*gossamer, str(ROOT / "benchmarks" / program), "--folder", str(logs / "steps"), *script]


@contextmanager
def run(
    workers: str,
    options: Sequence[str],
    script: Sequence[str],
    keep: Path | None = None,
    program: str = "elastic_worker.py",
) -> Iterator[DrivenRun]:
    """A run of a program of benchmarks, which is over afterwards. keep: where its logs stay."""
    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(temporary) if keep is None else keep
        (logs / "steps").mkdir(parents=True)
        running = DrivenRun(command(workers, options, logs, script, program), logs / "steps")
        try:
            yield running
        finally:
            running.end()
