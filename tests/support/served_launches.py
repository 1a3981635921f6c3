"""Runs of launch_peers: workers and servers that start in no time, and what was shown of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

from gossamer.base import system
from gossamer.launcher.failure import Outcome
from gossamer.launcher.job import Job, Serving, spawn
from gossamer.launcher.served_run import launch_peers

# Starts in no time, unlike one that imports torch; tests of launch_peers also start the real one
TINY_WORKER = """
import json, os, runpy, sys
if sys.argv[1] == "--standby":
    del sys.argv[1]
    with open(os.path.join(os.environ["GOSSAMER_RUN_DIRECTORY"], "standbys"), "a") as file:
        print(os.getpid(), file=file)
    if not (line := sys.stdin.readline()):
        sys.exit()
    os.environ.update(json.loads(line))
script, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""
SERVER = """
import os, signal, socket, sys
k = int(os.environ["GOSSAMER_SERVER"])
host, port = os.environ["GOSSAMER_SERVERS"].split(",")[k].split(":")
journal = os.path.join(os.environ["GOSSAMER_JOURNAL"], "starts")
with open(journal, "a") as file:
    file.write("x")
{}
with socket.create_server((host, int(port))) as listener:
    while True:
        taken, _ = listener.accept()
        with taken:
            taken.sendall(f"{{k}} {{os.getpid()}} {{os.path.getsize(journal)}}".encode())
"""
WORKER = """
import os, signal, socket, sys, time
rank = int(os.environ["RANK"])
def ask(server):
    host, port = os.environ["GOSSAMER_SERVERS"].split(",")[server].split(":")
    while True:
        try:
            with socket.create_connection((host, int(port))) as link:
                server, pid, starts = map(int, link.makefile().read().split())
                return server, pid, starts
        except (ConnectionError, ValueError):  # not there, or gone before it had answered
            time.sleep(0.01)
def wait_for(name):
    while not os.path.exists(os.path.join(os.path.dirname(__file__), name)):
        time.sleep(0.01)
def tell(name):
    open(os.path.join(os.path.dirname(__file__), name), "w").close()
"""


@dataclass
class WarmPrograms:
    """Starts new programs, and takes part in a run as forks that warm up: the file shows it."""

    file: Path

    def __call__(self, *given: Any) -> system.Process:
        return spawn(*given)

    def warm_up(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        self.file.touch()
        return True


@dataclass
class Run:
    """Launches scripts beside servers, and keeps what was shown."""

    directory: Path
    lines: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tick: Callable[[], None] = lambda: None

    def __call__(self, script: str, *, server: str = "", serving: dict[str, Any] | None = None, **job: Any) -> Outcome:
        for name, text in {
            "tiny.py": TINY_WORKER,
            "server.py": SERVER.format(dedent(server)),
            "script.py": WORKER + dedent(script),
        }.items():
            (self.directory / name).write_text(text)
        self.private.mkdir()
        command = (sys.executable, "-S", "-u", str(self.directory / "server.py"))
        options = {"worker_module": "tiny", "settings": {"PYTHONPATH": str(self.directory)}} | job
        return launch_peers(
            Job(script=self.directory / "script.py", logs=self.directory / "logs", **options),
            Serving(**({"servers": 1, "command": command, "standby": ()} | (serving or {}))),
            self.private,
            show=lambda rank, line: self.lines.append((rank, line)),
            note=self.notes.append,
            tick=lambda: self.tick(),
        )

    @property
    def private(self) -> Path:
        return self.directory / "private"

    def log(self, name: str) -> str:
        return (self.directory / "logs" / f"{name}.log").read_text()
