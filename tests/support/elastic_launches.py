"""Launches of elastic runs: workers that start in no time, and a coordinator that only listens to its launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

from support.elastic_policies import VirtualCoordinator
from support.served_launches import TINY_WORKER

from gossamer.launcher.elastic_run import Coordinate, launch_members
from gossamer.launcher.failure import Outcome
from gossamer.launcher.job import Elasticity, Job, WorkerRange

WORKER = """
import os, signal, sys, time
place, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
here, run = os.path.dirname(__file__), os.environ["GOSSAMER_RUN_DIRECTORY"]
def wait_for(name, folder=here):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)
def tell(name, folder=here):
    open(os.path.join(folder, name), "w").close()
def reach(stage):
    tell(f"{stage}-{attempt}-{place}", run)
"""


@dataclass
class MemberRun:
    """Launches a script as an elastic run, and keeps what was shown."""

    directory: Path
    lines: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    coordinator: VirtualCoordinator = field(default_factory=VirtualCoordinator)
    coordinate: Coordinate | None = None  # None for that one
    tick: Callable[[], None] = lambda: None

    def __call__(
        self, script: str, *, range_: str = "1:4", joins: bool = False, relays: bool = False, **job: Any
    ) -> Outcome:
        for name, text in {"tiny.py": TINY_WORKER, "script.py": WORKER + dedent(script)}.items():
            (self.directory / name).write_text(text)
        self.private.mkdir()
        self.logs.mkdir()
        path = os.pathsep.join(filter(None, (str(self.directory), os.environ.get("PYTHONPATH"))))
        options = {"worker_module": "tiny", "settings": {"PYTHONPATH": path}, "workers": 2} | job
        least, most = map(int, range_.split(":"))
        return launch_members(
            Job(script=self.directory / "script.py", logs=self.logs, **options),
            Elasticity(
                range=WorkerRange(least=least, most=most, initial=options["workers"]),
                listen=None if joins and not relays else ("127.0.0.1", 0),
                coordinator=("127.0.0.1", 9) if joins else None,
                relays=relays,
            ),
            self.private,
            show=lambda rank, line: self.lines.append((rank, line)),
            note=self.notes.append,
            tick=lambda: self.tick(),
            coordinate=self.coordinate or (lambda *given: self.coordinator),
            show_secret=self.secrets.append,
            staffed=lambda workers, places: self.sizes.append((workers, places)),
        )

    def tell(self, name: str) -> None:
        (self.directory / name).touch()

    @property
    def private(self) -> Path:
        return self.directory / "private"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"
