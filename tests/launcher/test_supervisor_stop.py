"""Requests to stop, in virtual time: what workers are sent, and when somebody does not want to wait."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import cast

import pytest

from gossamer.base.run_files import RunFiles
from gossamer.launcher import process
from gossamer.launcher.process import ManagedProcess
from gossamer.launcher.supervisor import StopRequest, Supervisor, end_by_request


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: dict[float, Callable[[], None]] = {}

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for moment in [moment for moment in self.events if moment <= self.seconds]:
            self.events.pop(moment)()


class Worker:
    """A process that takes `saves_seconds` to end when it is asked to; never, where that is None."""

    def __init__(self, number: int, clock: Clock, saves_seconds: float | None, entered: bool = True) -> None:
        self.number, self.entered, self.lives = number, entered, True
        self.asked: list[signal.Signals] = []
        self.ended_at: float | None = None
        self._clock, self._saves_seconds = clock, saves_seconds
        self._due: float | None = None

    def ask_to_end(self, number: signal.Signals) -> None:
        self.asked.append(number)
        self._due = None if self._saves_seconds is None else self._clock.seconds + self._saves_seconds

    def ended(self) -> int | None:
        if self.lives and self._due is not None and self._clock.seconds >= self._due:
            return self._end(0)
        return None

    def kill(self) -> None:
        self.asked.append(signal.SIGKILL)

    def wait(self) -> int | None:
        return self._end(-signal.SIGKILL)

    def _end(self, exit_code: int) -> int:
        self.lives, self.ended_at = False, self._clock.seconds
        return exit_code


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(process, "time", clock)
    return clock


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def end(
    clock: Clock, files: RunFiles, number: signal.Signals, *workers: Worker, grace_seconds: float = 30.0
) -> list[str]:
    """The notes of a request by this signal at time 0; clock.events may send it again."""
    notes: list[str] = []
    stop = StopRequest(clock.monotonic)
    clock.events = {moment: lambda: stop(number) for moment in clock.events}
    stop(number)
    end_by_request(cast(list[ManagedProcess], list(workers)), stop, files, grace_seconds, notes.append)
    return notes


@pytest.mark.parametrize(
    ("number", "sent"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_workers_get_the_signal_once_and_time_to_save(
    clock: Clock, files: RunFiles, number: signal.Signals, sent: int
) -> None:
    workers = [Worker(rank, clock, saves) for rank, saves in enumerate((20.0, 1.0))]
    (note,) = end(clock, files, number, *workers)
    assert [worker.asked for worker in workers] == [[sent], [sent]]
    assert note.startswith("waiting up to 30 s for the workers to save")
    assert files.interrupted.exists() is (number == signal.SIGINT)


def test_workers_get_time_to_save_if_the_folder_of_the_run_was_removed(clock: Clock, tmp_path: Path) -> None:
    gone = RunFiles(tmp_path / "removed")
    workers = [Worker(rank, clock, saves) for rank, saves in enumerate((20.0, 1.0))]
    end(clock, gone, signal.SIGINT, *workers)
    assert [worker.asked for worker in workers] == [[signal.SIGINT], [signal.SIGINT]]


def test_a_signal_is_kept_if_the_folder_of_the_run_was_removed(tmp_path: Path) -> None:
    supervisor = Supervisor(RunFiles(tmp_path / "removed"), 30.0, pytest.fail, lambda: None)
    supervisor._on_signal(signal.SIGTERM, None)
    assert supervisor.stop.number == signal.SIGTERM


def test_one_that_still_imports_is_not_interrupted_but_ended(clock: Clock, files: RunFiles) -> None:
    importing = Worker(0, clock, 0.0, entered=False)
    assert end(clock, files, signal.SIGINT, importing) == []
    assert importing.asked == [signal.SIGTERM]


def test_a_worker_that_has_not_ended_in_time_is_killed_and_named(clock: Clock, files: RunFiles) -> None:
    quick, stuck = Worker(0, clock, 5.0), Worker(3, clock, None)
    _, killed = end(clock, files, signal.SIGINT, quick, stuck, grace_seconds=10.0)
    assert killed == "killed, because they had not ended by then: rank 3"
    assert quick.ended_at == pytest.approx(5.0, abs=process.POLL_SECONDS)
    assert stuck.ended_at == pytest.approx(10.0, abs=process.POLL_SECONDS)


def test_ctrl_c_again_ends_them_now(clock: Clock, files: RunFiles) -> None:
    stuck = Worker(0, clock, None)
    clock.events = {2.0: lambda: None}
    waiting, _ = end(clock, files, signal.SIGINT, stuck)
    assert waiting.endswith("press Ctrl-C again to end them now")
    assert stuck.ended_at == pytest.approx(2.0, abs=process.POLL_SECONDS)


def test_a_ctrl_c_that_a_wrapper_doubles_is_one(clock: Clock, files: RunFiles) -> None:
    saving = Worker(0, clock, 10.0)
    clock.events = {0.1: lambda: None}
    end(clock, files, signal.SIGINT, saving)
    assert saving.asked == [signal.SIGINT]


def test_signals_are_kept_and_nothing_is_raised() -> None:
    ticks = count()
    stop = StopRequest(lambda: float(next(ticks)))
    assert not stop
    stop(signal.SIGTERM)
    assert (bool(stop), stop.number, stop.hurried()) == (True, signal.SIGTERM, False)
    stop(signal.SIGINT)
    assert (stop.number, stop.hurried()) == (signal.SIGTERM, True)
