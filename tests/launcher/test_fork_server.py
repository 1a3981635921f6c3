"""Workers of `gossamer run` are forks of one process that has imported torch, and see what new programs see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import all_end_soon, of_this_checkout, watched

from gossamer.base import system
from gossamer.launcher.fork_server import fork_server
from gossamer.launcher.job import spawn

pytestmark = [
    pytest.mark.new_programs,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems start workers as new programs"),
]

# Its argument: what another program does first
GOSSAMER = "import sys; exec(sys.argv.pop(1)); from gossamer.cli.main import main; main()"
OBSERVES = """
import json, os, random, signal, sys, threading, time
import torch
import numpy
kinds = [type(sys.stdout), sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.__stderr__.errors]
print("found", json.dumps({
    "forked": "run" in sys.orig_argv,
    "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"],
    "draws": [random.random(), torch.rand(1).item(), numpy.random.rand(), torch.initial_seed()],
    "same": {
        "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "cwd": os.getcwd(),
        "module": sys.modules["__main__"].__file__, "kinds": [str(kind) for kind in kinds],
        "parent": os.getppid() == int(os.environ["GOSSAMER_LAUNCHER_PID"]),
        "stdin": os.readlink("/proc/self/fd/0") == os.readlink(f"/proc/{os.getppid()}/fd/0"),
        "leads": os.getpid() == os.getpgid(0) == os.getsid(0),
        "interrupt": str(signal.getsignal(signal.SIGINT)).split(" at ")[0], "threads": torch.get_num_threads(),
        "environment": {key: value for key, value in os.environ.items() if key not in UNIQUE},
    },
}), flush=True)
"""
UNIQUE = {"GOSSAMER_RUN_DIRECTORY", "GOSSAMER_LAUNCHER_PID", "GOSSAMER_RUN", "GOSSAMER_TOKEN_FILE", "MASTER_PORT"}
OBSERVES = f"UNIQUE = {UNIQUE} | {{'GOSSAMER_FORK'}}\n{OBSERVES}"


def found(directory: Path, script: str, *options: str, first: str = "", **added: str) -> list[dict[str, Any]]:
    """What the workers of `gossamer run` print after `found`, by rank and time."""
    (directory / "train.py").write_text(script)
    environment = {key: value for key, value in of_this_checkout().items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", GOSSAMER, first, "run", *options, "train.py", "--lr", "1"],
        cwd=directory, env=environment | added, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "found {" in line)
    return [{**json.loads(line.partition("found ")[2]), "notes": done.stderr} for line in lines]


@pytest.mark.processes
def test_a_forked_worker_sees_what_a_new_program_sees(tmp_path: Path) -> None:
    forked = found(tmp_path, OBSERVES, "--workers", "2", "--recipe", "Int8()")
    new = found(tmp_path, OBSERVES, "--workers", "2", "--recipe", "Int8()", GOSSAMER_FORK="0")
    assert [worker["forked"] for worker in (*forked, *new)] == [True, True, False, False]
    assert [worker["same"] for worker in forked] == [worker["same"] for worker in new]


@pytest.mark.processes
def test_forked_workers_draw_different_numbers_and_restart_as_forks(tmp_path: Path) -> None:
    dies = "import os, signal\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), signal.SIGKILL)"
    each = found(tmp_path, f"{OBSERVES}\n{dies}", "--workers", "2", "--max-restarts", "1")
    assert {worker["forked"] for worker in each} == {True}
    assert {worker["attempt"] for worker in each} >= {"1"}
    assert "signal SIGKILL" in each[0]["notes"]
    for draws in zip(*(worker["draws"] for worker in each), strict=True):
        assert len(set(draws)) == len(each) >= 3


# A worker's siblings are the fork server, which has the launcher's command, and the watchdog
KILLS_SERVER = """
import os, signal
from pathlib import Path
def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()
parent = os.getppid()
siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
(server,) = (int(pid) for pid in siblings if int(pid) != os.getpid() and command(pid) == command(parent))
os.kill(server, signal.SIGKILL)
os._exit(3)
"""


@pytest.mark.processes
def test_workers_are_new_programs_once_the_server_is_lost(tmp_path: Path) -> None:
    script = f"import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n exec({KILLS_SERVER!r})\n{OBSERVES}"
    (worker,) = found(tmp_path, script, "--workers", "1", "--max-restarts", "1")
    assert (worker["forked"], worker["attempt"]) == (False, "1")


@pytest.mark.processes
def test_a_worker_is_a_new_program_where_an_import_has_used_a_gpu(tmp_path: Path) -> None:
    used = "import torch; torch._C._cuda_isInBadFork = lambda: True"
    (worker,) = found(tmp_path, OBSERVES, "--workers", "1", first=used, OMP_NUM_THREADS="1")
    assert not worker["forked"]


@watched
@pytest.mark.processes
def test_the_server_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('runs', flush=True)\ntime.sleep(100)")
    with subprocess.Popen(
        [sys.executable, "-c", GOSSAMER, "", "run", "--workers", "1", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=of_this_checkout(),
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        assert b"runs" in launcher.stdout.readline()
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        opened = [os.pidfd_open(int(pid)) for pid in children]
        launcher.kill()
        assert all_end_soon(opened)
    assert len(opened) == 3  # with the worker and the watchdog


@pytest.mark.parametrize("started", [["python", "-X", "utf8", "-m", "gossamer"], ["python", "-I", "gossamer"]])
def test_options_of_the_interpreter_keep_new_programs(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(system, "fork", lambda: pytest.fail("forked"))
    with fork_server("gossamer.cli.worker", None) as begin:
        assert begin is spawn


def test_a_process_without_the_system_call_starts_new_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "gossamer"])
    monkeypatch.setattr(system, "adopt_orphans", lambda adopt: False)
    monkeypatch.setattr(system, "fork", lambda: pytest.fail("forked"))
    with fork_server("gossamer.cli.worker", None) as begin:
        assert begin is spawn
