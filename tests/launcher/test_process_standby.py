from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from support.processes import eventually

from gossamer.base.run_files import RunFiles, Stage
from gossamer.launcher import process
from gossamer.launcher.parent_watchdog import OrphanReaper
from gossamer.launcher.process import ManagedProcess, StandbyProcess
from gossamer.launcher.process_logs import ProcessLog

PYTHON = (sys.executable, "-S", "-u", "-c")
WAITS = """
import json, os, sys
print("waits", os.getpid(), flush=True)
if line := sys.stdin.readline():
    os.environ.update(json.loads(line))
    print("takes", os.getpid(), os.environ["PLACE"], os.environ["COMMON"])
"""
BEGINS = "import os; print('begins', os.getpid(), os.environ['PLACE'], os.environ['COMMON'])"
COMMON = {"COMMON": "for all", "PATH": os.environ.get("PATH", "")}
MINE = {**COMMON, "PLACE": "3"}


# -- Which process is made when: in virtual time, without processes ----------------------------------------------------


@dataclass
class Worker:
    lives: bool = True
    trains: bool = False
    age_seconds: float = 0.0


class StandIn:
    """A process that only waits on its input."""

    pid, stdin = 1, None

    def poll(self) -> int:
        return 0  # it has ended, so that `take` makes another process; the real ones are below


class Forks:
    """A server of forks that warms up, as far as a launcher sees it."""

    def __init__(self, made: Made, possible: bool = True) -> None:
        self.possible, self._made, self._is_warm = possible, made, False

    def __call__(self, *given: object) -> Any:
        self._made.note("warm fork" if self._is_warm else "fork")

    def warm_up(self, command: object, environment: object) -> bool:
        assert (command, environment) == (PYTHON, COMMON)
        if self.possible and not self._is_warm:
            self._is_warm = True
            self._made.note("warms up")
        return self.possible


@dataclass
class Made:
    """What is made, with the tenths of a second at which it is."""

    patch: pytest.MonkeyPatch
    now: int = 0
    events: list[tuple[int, str]] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=lambda: [Worker(), Worker()])

    def note(self, event: str) -> None:
        self.events.append((self.now, event))

    def standby(self, begin: Any = None) -> StandbyProcess:
        def spawn(*given: object, **options: object) -> StandIn:
            self.note("standby")
            return StandIn()

        self.patch.setattr(process, "spawn", spawn)
        self.patch.setattr(StandbyProcess, "_end", lambda self, process: None)
        begin = begin or (lambda *given: self.note("new program"))
        groups = cast(OrphanReaper, Groups())
        return StandbyProcess(PYTHON, COMMON, Path(), Path(), groups, begin, lambda: self.now / 10)

    def until(self, moment: int, standby: StandbyProcess, *, ends: bool = False) -> None:
        while self.now < moment:
            standby.look(cast(list[ManagedProcess], self.workers), ends=ends)
            self.now += 1

    def loses_the_second(self, standby: StandbyProcess) -> None:
        """The second worker is replaced, and trains four tenths later."""
        self.workers[1].trains = False
        standby.take(PYTHON, MINE, Path(), Path())
        self.until(self.now + 4, standby)
        self.workers[1].trains = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def train_and_lose_one(made: Made, standby: StandbyProcess) -> None:
    """One worker trains at 5.0 s, the other at 9.0 s; it is lost at 30.0 s."""
    made.until(50, standby)
    made.workers[0].trains = True
    made.until(90, standby)
    made.workers[1].trains = True
    made.until(300, standby)
    made.loses_the_second(standby)
    made.until(400, standby)


def test_each_standby_begins_two_seconds_after_all_workers_train(made: Made) -> None:
    train_and_lose_one(made, made.standby())
    assert [moment for moment, event in made.events if event == "standby"] == [109, 323]


def test_the_launcher_of_forks_makes_no_standby_and_warms_up_once(made: Made) -> None:
    train_and_lose_one(made, made.standby(Forks(made)))
    assert made.events == [(109, "warms up"), (300, "warm fork")]


def test_a_loss_before_the_forks_are_warm_is_replaced_by_another_fork(made: Made) -> None:
    standby = made.standby(Forks(made))
    made.workers[0].trains = True
    made.until(30, standby)
    made.loses_the_second(standby)
    made.until(100, standby)
    assert made.events == [(30, "fork"), (53, "warms up")]


def test_standbys_begin_where_forks_cannot_warm_up(made: Made) -> None:
    train_and_lose_one(made, made.standby(Forks(made, possible=False)))
    assert made.events == [(109, "standby"), (300, "fork"), (323, "standby")]


def test_a_standby_begins_once_the_server_of_forks_is_lost(made: Made) -> None:
    forks = Forks(made)
    standby = made.standby(forks)
    made.workers = [Worker(trains=True)]
    made.until(100, standby)
    forks.possible = False
    made.until(200, standby)
    assert made.events == [(20, "warms up"), (100, "standby")]


def test_nothing_waits_for_workers_that_have_ended(made: Made) -> None:
    made.workers = [Worker(trains=True), Worker(lives=False)]
    made.until(100, made.standby())
    assert made.events == [(20, "standby")]


def test_a_worker_that_waits_for_a_place_is_not_waited_for_forever(made: Made) -> None:
    made.workers = [Worker(trains=True), Worker(age_seconds=process.START_SECONDS - 1)]
    standby = made.standby()
    made.until(100, standby)
    made.workers[1].age_seconds += 1
    made.until(200, standby)
    assert made.events == [(119, "standby")]


@pytest.mark.parametrize("forks", [True, False])
def test_nothing_is_made_for_a_run_that_ends(made: Made, forks: bool) -> None:
    made.workers = [Worker(trains=True)]
    made.until(100, made.standby(Forks(made) if forks else None), ends=True)
    assert made.events == []


@pytest.mark.parametrize("stage", Stage)
def test_a_worker_trains_once_it_has_attached_or_joined_a_group_without_a_session(tmp_path: Path, stage: Stage) -> None:
    files = RunFiles(tmp_path)
    worker = ManagedProcess(3, files, cast(OrphanReaper, Groups()), (), lambda attempt: {}, cast(ProcessLog, None))
    assert not worker.trains
    files.report_start(3, 0, 1)
    files.mark(stage, 3, 0)
    assert worker.trains is (stage in (Stage.ATTACHED, Stage.OTHERWISE))
    files.report_start(3, 1, 2)
    assert not worker.trains, "the replacement does not yet"


# -- Standbys that are processes ---------------------------------------------------------------------------------------


@dataclass
class Groups:
    """A guard that only remembers."""

    known: set[int] = field(default_factory=set)

    def add(self, group: int) -> None:
        self.known.add(group)

    def remove(self, group: int) -> None:
        self.known.discard(group)


@dataclass
class Waiting:
    """A spare in a directory, and what becomes of it."""

    directory: Path
    groups: Groups = field(default_factory=Groups)

    def made(self, *command: str) -> StandbyProcess:
        files = [self.directory / name for name in ("spare.txt", "spare-boot.txt")]
        return StandbyProcess(command, COMMON, *files, cast(OrphanReaper, self.groups))

    def pid(self) -> int:
        """Of the one that waits, once it does."""
        assert eventually(lambda: len(self.said("spare.txt")) == 2)
        return int(self.said("spare.txt")[1])

    def said(self, name: str) -> list[str]:
        path = self.directory / name
        return path.read_text().split() if path.exists() else []

    def took(self, kept: StandbyProcess) -> list[str]:
        """What a process with this environment printed; and no more is heard of it."""
        taken = kept.take((*PYTHON, BEGINS), MINE, self.directory / "out.txt", self.directory / "boot.txt")
        assert taken.wait(100) == 0
        return self.said("out.txt")


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    found = Waiting(tmp_path)
    yield found
    assert not any(Path(f"/proc/{pid}").exists() for pid in found.groups.known), "a spare outlived its run"


def check_the_one_that_waits_is_used(waiting: Waiting) -> None:
    kept = waiting.made(*PYTHON, WAITS)
    kept.look()
    pid = str(waiting.pid())
    kept.look()  # is there
    assert waiting.groups.known == {int(pid)}
    assert waiting.took(kept) == ["waits", pid, "takes", pid, "3", "for", "all"]
    kept.look()
    assert waiting.pid() != int(pid)
    kept.close()


@pytest.mark.processes
def test_the_one_that_waits_takes_the_place_with_its_environment(waiting: Waiting) -> None:
    check_the_one_that_waits_is_used(waiting)


@pytest.mark.processes
def test_the_check_of_spares_notices_one_that_is_not_used(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    take = StandbyProcess.take

    def forgets(self: StandbyProcess, *given: object) -> object:
        self.close()
        return take(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(StandbyProcess, "take", forgets)
    with pytest.raises(AssertionError):
        check_the_one_that_waits_is_used(waiting)


@pytest.mark.processes
def test_where_none_waits_another_process_begins(waiting: Waiting) -> None:
    kept = waiting.made(*PYTHON, WAITS)
    assert waiting.took(kept)[::2] == ["begins", "3", "all"]
    kept.look()
    os.kill(waiting.pid(), signal.SIGKILL)
    assert kept._process is not None
    kept._process.wait()
    assert waiting.took(kept)[::2] == ["begins", "3", "all"]
    assert waiting.groups.known == set()
    none = waiting.made()
    none.look()
    assert waiting.took(none)[0] == "begins"


@pytest.mark.processes
def test_what_cannot_be_started_ends_no_run(waiting: Waiting) -> None:
    kept = waiting.made("/nowhere/python")
    kept.look()
    assert waiting.took(kept)[::2] == ["begins", "3", "all"]


@pytest.mark.processes
def test_one_that_stands_still_is_ended_all_the_same(waiting: Waiting) -> None:
    kept = waiting.made(*PYTHON, WAITS)
    kept.look()
    os.kill(waiting.pid(), signal.SIGSTOP)
    kept.close()
    kept.close()
    assert waiting.groups.known == set()


@pytest.mark.processes
def test_it_ends_with_its_input(waiting: Waiting) -> None:
    """As when the launcher is killed, and its guard with it."""
    kept = waiting.made(*PYTHON, WAITS)
    kept.look()
    waits = kept._process
    assert waits is not None
    assert waits.stdin is not None
    waits.stdin.close()
    assert waits.wait(100) == 0
    kept.close()


@pytest.mark.processes
def test_nobody_competes_with_what_begins(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 600.0)
    kept = waiting.made(*PYTHON, WAITS)
    kept.look()
    assert waiting.groups.known == set()
