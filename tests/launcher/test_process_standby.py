from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from support.processes import eventually

from gossamer.launcher import process
from gossamer.launcher.parent_watchdog import OrphanReaper
from gossamer.launcher.process import StandbyProcess

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

pytestmark = pytest.mark.processes


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


def test_the_one_that_waits_takes_the_place_with_its_environment(waiting: Waiting) -> None:
    check_the_one_that_waits_is_used(waiting)


def test_the_check_of_spares_notices_one_that_is_not_used(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    take = StandbyProcess.take

    def forgets(self: StandbyProcess, *given: object) -> object:
        self.close()
        return take(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(StandbyProcess, "take", forgets)
    with pytest.raises(AssertionError):
        check_the_one_that_waits_is_used(waiting)


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


def test_what_cannot_be_started_ends_no_run(waiting: Waiting) -> None:
    kept = waiting.made("/nowhere/python")
    kept.look()
    assert waiting.took(kept)[::2] == ["begins", "3", "all"]


def test_one_that_stands_still_is_ended_all_the_same(waiting: Waiting) -> None:
    kept = waiting.made(*PYTHON, WAITS)
    kept.look()
    os.kill(waiting.pid(), signal.SIGSTOP)
    kept.close()
    kept.close()
    assert waiting.groups.known == set()


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


def test_nobody_competes_with_what_begins(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 600.0)
    kept = waiting.made(*PYTHON, WAITS)
    kept.look()
    assert waiting.groups.known == set()
