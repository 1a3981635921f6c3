"""Live view: follows the files of running workers, and sums them up in one line of progress."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.base.units import bytes_text, seconds_text, share_text, short
from gossamer.observe.event_log import live_path

WINDOW_LINES = 40
SUMS = ("steps_made", "bytes_sent", "waiting_seconds", "step_seconds")  # of a session, in lines of steps
MOST_LINE_BYTES = 2**24  # of a line; longer lines are not read
SILENT_SECONDS = 2.0
LATE_SECONDS, LATE_STEPS = 5.0, 5.0  # without a step, for the line of progress to name it: the longer of the two
WITHOUT_SCALER = " With a GradScaler write attach(..., scaler=scaler)."


class LiveFile:
    """The lines added to a file since the last call.

    A restarted worker truncates its file. That is detected if the file is shorter than the bytes read; otherwise by a
    line that does not parse: the tail of a JSON object is not valid JSON.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._added()
        except ValueError:
            self._offset = 0
            yield from self._added()

    def _added(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    return  # not complete yet
                found = json.loads(line)
                self._offset += len(line)
                yield found


@dataclass
class Window:
    """The latest steps of one worker."""

    period: int = 1  # steps after which the recipe's schedule repeats
    lines: deque[dict[str, Any]] = field(default_factory=deque)
    last_line_at: float = 0.0  # time of the last one

    def add(self, line: dict[str, Any]) -> None:
        """Add a line. WINDOW_LINES are kept, or more if they have fewer steps than a period."""
        self.lines.append(line)
        while len(self.lines) > WINDOW_LINES and line["steps_made"] - self.lines[1]["steps_made"] >= self.period:
            self.lines.popleft()

    @property
    def step(self) -> int:
        return int(self.lines[-1]["step"])

    @property
    def latest(self) -> dict[str, float]:
        """Sums over the latest steps, as many whole periods as there are, or over all steps so far: local steps send
        nothing between two rounds."""
        last = self.lines[-1]
        older = [line for line in self.lines if last["steps_made"] - line["steps_made"] >= self.period]
        since = min(older, key=lambda line: (last["steps_made"] - line["steps_made"]) % self.period, default={})
        return {name: last[name] - since.get(name, 0) for name in SUMS}


@dataclass
class Progress:
    """Steps of the active worker that is furthest ahead; messages of all workers, each once."""

    clock: Callable[[], float] = time.monotonic
    starting: object = "starting"  # its str() is the line before the first step
    workers: int | None = None  # current number in an elastic run
    attached: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    _windows: dict[int, Window] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)

    @property
    def window(self) -> Window:
        """Steps of the furthest worker that reported within SILENT_SECONDS of the latest report."""
        started = [window for window in self._windows.values() if window.lines]
        latest = max((window.last_line_at for window in started), default=0.0)
        active = [window for window in started if window.last_line_at >= latest - SILENT_SECONDS]
        return max(active, key=lambda window: window.step) if active else Window()

    def take(self, line: dict[str, Any], worker: int = 0) -> str | None:
        """Process one live line of a worker. Return a message to show, if it is new."""
        match line:
            case {"kind": "attached"}:
                self.attached = line
                self._windows[worker] = Window(line["period"])
            case {"kind": "switched"} if worker in self._windows:
                self._windows[worker].period = line["period"]
            case {"kind": "step"}:
                window = self._windows.setdefault(worker, Window())
                window.add(line)
                window.last_line_at = self.clock()
            case {"kind": "saved"}:
                self.checkpoint = line
            case {"kind": "noticed", "message": message}:
                return self._once(message)
            case {"kind": "skipped", "step": step, "rank": rank, "tensor": tensor}:
                skipped = self._once(
                    f"Step {step} was skipped on every worker, because the gradient of {tensor!r} was not "
                    f"finite on rank {rank}.{'' if line.get('scaled') else WITHOUT_SCALER}"
                )
                return " ".join(filter(None, (skipped, self._batch(line)))) or None
        return None

    def _batch(self, line: Mapping[str, Any]) -> str | None:
        """The batch that had the skipped gradient, if its rank reports one."""
        if line.get("batch") is None:
            return None
        return self._once(f"At step {line['step']} rank {line['rank']} was at batch {line['batch']} of its epoch.")

    def _once(self, sentence: str) -> str | None:
        if sentence in self._shown:
            return None
        self._shown.add(sentence)
        return sentence

    def __str__(self) -> str:
        """One line: position and speed of the run, the time that is left if the number of steps is known, and the time
        since its last step if that is unusually long."""
        window = self.window
        count = () if self.workers is None else (f"{self.workers} worker{'s' * (self.workers != 1)}",)
        whole = None if self.attached is None else self.attached.get("steps")
        return " · ".join((*count, *_parts(window, whole), *self._late(window))) if window.lines else str(self.starting)

    def _late(self, window: Window) -> Iterator[str]:
        speed = _steps_per_second(window.lines)
        silent = self.clock() - max(each.last_line_at for each in self._windows.values())
        if speed is not None and silent > max(LATE_SECONDS, LATE_STEPS / speed):
            yield f"no step for {seconds_text(round(silent))}"


def _steps_per_second(window: Sequence[dict[str, Any]]) -> float | None:
    """Mean over the window; None with one line."""
    steps, elapsed = (window[-1][name] - window[0][name] for name in ("steps_made", "seconds"))
    return steps / elapsed if steps > 0 and elapsed > 0 else None


def _parts(window: Window, whole: int | None) -> Iterator[str]:
    """whole: steps of the training."""
    last, sums = window.lines[-1], window.latest
    known = whole is not None and last["step"] <= whole
    yield f"step {last['step']} of {whole}" if known else f"step {last['step']}"
    if (speed := _steps_per_second(window.lines)) is not None:
        yield f"{short(speed)} steps/s"
    if "loss" in last["metrics"]:
        yield f"loss {short(float(last['metrics']['loss']))}"
    yield f"{bytes_text(sums['bytes_sent'] / sums['steps_made'])}/step"
    yield f"{share_text(sums['waiting_seconds'] / sums['step_seconds'] if sums['step_seconds'] else 0.0)} waiting"
    left = f", {seconds_text(round((whole - last['step']) / speed))} left" if whole and known and speed else ""
    yield seconds_text(round(last["seconds"])) + left


class LiveView:
    """Follows the live files of this machine's ranks. starting: its str() is the progress before the first step."""

    def __init__(self, directory: Path, ranks: Iterable[int], starting: object = "starting") -> None:
        self._directory = directory
        self._files = {rank: LiveFile(live_path(directory, rank)) for rank in ranks}
        self.progress = Progress(starting=starting)

    def staff(self, workers: int, places: int) -> None:
        """Show this number of workers, and follow the first `places` ranks, of which some may be new."""
        self.progress.workers = workers
        late = [rank for rank in range(places) if rank not in self._files]
        # A new dict, since another thread may be iterating
        self._files = {**self._files, **{rank: LiveFile(live_path(self._directory, rank)) for rank in late}}

    def look(self) -> list[str]:
        """The messages since the last call."""
        taken = [self.progress.take(line, rank) for rank, file in self._files.items() for line in file.lines()]
        return [sentence for sentence in taken if sentence]
