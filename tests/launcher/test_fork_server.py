"""Workers of `gossamer run` are forks of one process that has imported torch, and see what new programs see."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.processes import all_end_soon, of_this_checkout, watched

from gossamer.base import system
from gossamer.launcher import fork_server as servers
from gossamer.launcher import worker as programs
from gossamer.launcher.fork_server import ForkedProcess, ForkServer, fork_server
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


# -- A server that warms up, for replacements of lost workers ----------------------------------------------------------

COMMAND = servers.new_program("gossamer.cli.worker")
GIVEN = {"OMP_NUM_THREADS": "1", "SHARED": "yes"}
NOT_YET = 2**22 + 1  # the id of no process


@dataclass
class Launcher:
    """A launcher's side of a server that the test plays."""

    server: ForkServer
    other_end: socket.socket

    def start(self, environment: dict[str, str] | None = None) -> str:
        made = self.server([*COMMAND, "train.py"], environment or GIVEN, Path("out"), Path("boot"))
        return f"fork {made.pid}" if isinstance(made, ForkedProcess) else "new program"

    def answers(self, text: str) -> None:
        self.other_end.sendall(text.encode())

    def orders(self) -> list[dict[str, Any]]:
        """The orders since the last call."""
        self.other_end.setblocking(False)
        try:
            return [json.loads(line) for line in self.other_end.recv(2**20).splitlines()]
        except BlockingIOError:
            return []


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Launcher]:
    monkeypatch.chdir(tmp_path)
    ends = socket.socketpair()
    kept = ends[1].dup()
    with monkeypatch.context() as patch:
        patch.setattr(system, "fork", lambda: NOT_YET)
        patch.setattr(socket, "socketpair", lambda: ends)
        server = ForkServer("gossamer.cli.worker", "1")
    monkeypatch.setattr(servers, "spawn", lambda *given: None)
    with kept:
        yield Launcher(server, kept)
        server.close()


def test_a_server_warms_up_once_and_forks_before_and_after(launcher: Launcher) -> None:
    launcher.answers("7\n")
    assert launcher.start() == "fork 7"
    launcher.orders()
    assert all(launcher.server.warm_up([*COMMAND, "--standby"], GIVEN) for _ in range(3))
    assert launcher.orders() == [{"arguments": [], "environment": GIVEN, "files": []}]
    launcher.answers("1\n8\n")
    assert launcher.start() == "fork 8"
    (order,) = launcher.orders()
    assert order["arguments"] == ["train.py"]
    assert launcher.server.warm_up(COMMAND, GIVEN)
    assert not launcher.orders()


def test_a_launcher_does_not_wait_for_a_server_that_warms_up(launcher: Launcher) -> None:
    launcher.server.warm_up(COMMAND, GIVEN)
    launcher.orders()
    assert launcher.start() == "new program"
    assert not launcher.orders()


def test_a_server_that_ended_while_it_warmed_up_is_not_used(launcher: Launcher) -> None:
    assert launcher.server.warm_up(COMMAND, GIVEN)
    launcher.other_end.shutdown(socket.SHUT_RDWR)
    assert not launcher.server.warm_up(COMMAND, GIVEN)
    assert launcher.start() == "new program"


def test_a_server_that_was_killed_later_is_noticed_at_the_next_worker(launcher: Launcher) -> None:
    launcher.server.warm_up(COMMAND, GIVEN)
    launcher.answers("1\n")
    assert launcher.server.warm_up(COMMAND, GIVEN)
    launcher.other_end.shutdown(socket.SHUT_RDWR)
    assert launcher.start() == "new program"
    assert not launcher.server.warm_up(COMMAND, GIVEN)


def test_a_server_that_cannot_fork_now_is_used_again(launcher: Launcher) -> None:
    launcher.answers("0\n9\n")
    assert [launcher.start(), launcher.start()] == ["new program", "fork 9"]


def test_a_worker_that_has_claimed_its_start_is_not_started_again(launcher: Launcher) -> None:
    launcher.server._connection.settimeout(0.01)
    reply = launcher.server._reply

    def forked_without_an_answer() -> int:
        (order,) = launcher.orders()
        os.symlink("11", order["files"][-1])
        return reply()

    launcher.server._reply = forked_without_an_answer  # type: ignore[method-assign]
    assert launcher.start() == "fork 11"


def test_a_server_that_has_no_time_to_fork_is_left_for_a_new_program(launcher: Launcher) -> None:
    launcher.server._connection.settimeout(0.01)
    assert launcher.start() == "new program"
    (order,) = launcher.orders()
    assert servers.claim(order["files"][-1]) == os.getpid(), "the launcher has claimed the start"


# Within the launcher and its server: the server carries out an order after the launcher has given it up, but still
# adopts its worker; or the server does not answer, and the launcher waits for the worker's claim
LATE = """
import os, time
from gossamer.base import system
from gossamer.launcher import fork_server as servers
system.adopt_orphans = lambda adopt, adopts=system.adopt_orphans: adopts(True)
servers.REPLY_SECONDS, plain = 0.2, servers.ServesForks._carry_out
def carry_out(self, order):
    while not os.path.lexists(order.files[-1]):
        time.sleep(0.01)
    return plain(self, order)
servers.ServesForks._carry_out = carry_out
"""
SILENT = """
import os, time
from gossamer.launcher import fork_server as servers
servers.REPLY_SECONDS, launcher, claim = 0.2, os.getpid(), servers.claim
def claimed(path):
    while os.getpid() == launcher and not os.path.lexists(path):
        time.sleep(0.01)
    return claim(path)
servers.claim = claimed
servers.ServesForks._answer = lambda self, number: None
"""


@pytest.mark.processes
@pytest.mark.parametrize(("first", "forked"), [(LATE, False), (SILENT, True)], ids=["late", "silent"])
def test_a_rank_of_a_server_without_an_answer_is_started_once(tmp_path: Path, first: str, forked: bool) -> None:
    counts = "import os\nfile = os.open('starts', os.O_CREAT | os.O_APPEND | os.O_WRONLY)\nos.write(file, b'1')\n"
    (worker,) = found(tmp_path, counts + OBSERVES, "--workers", "1", first=first)
    assert worker["forked"] is forked
    assert (tmp_path / "starts").read_text() == "1"


@pytest.mark.parametrize(
    ("command", "environment"),
    [((sys.executable, "-m", "another", "program"), GIVEN), (COMMAND, {"OMP_NUM_THREADS": "2"})],
)
def test_a_server_does_not_warm_up_for_what_it_does_not_fork(
    launcher: Launcher, command: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert not launcher.server.warm_up(command, environment)
    assert not launcher.orders()


def starts_a_thread() -> None:
    stays = threading.Event()
    threading.Thread(target=stays.wait, daemon=True).start()
    STAYING.append(stays)


def fails() -> None:
    raise ImportError("no such module")


STAYING: list[threading.Event] = []


@pytest.mark.parametrize(
    ("warm_up", "bad_fork", "is_safe"),
    [(lambda: None, 0, True), (starts_a_thread, 0, False), (fails, 0, False), (lambda: None, 1, False)],
    ids=["plain imports", "a thread", "an error", "a GPU"],
)
def test_a_server_goes_on_only_if_its_forks_are_safe(
    warm_up: Any, bad_fork: int, is_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "warm_up", warm_up)
    monkeypatch.setattr(system, "fork", lambda: NOT_YET)
    monkeypatch.setattr(system, "exit_code_of", lambda child: bad_fork)
    monkeypatch.setattr(os, "environ", {})
    assert servers._warm_up({"GOSSAMER_ELASTIC": "2:8"}) is is_safe
    assert os.environ == {"GOSSAMER_ELASTIC": "2:8"}
    while STAYING:
        STAYING.pop().set()


WARMS_UP = """
import json, os, sys, tempfile, time
from pathlib import Path
import torch
from gossamer.launcher.fork_server import ServesForks, fork_server
from gossamer.launcher.job import Job

def launch():
    folder = Path(tempfile.mkdtemp(dir="."))
    job = Job(script=Path("train.py"), logs=folder, workers=1, worker_module="gossamer.cli.worker", max_restarts=1)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    given = {**os.environ, **job.environment(folder), **rank}
    with fork_server(job.worker_module, "1") as begin:
        command = (sys.executable, *job.worker_arguments)
        def shown():
            worker = begin(command, given, folder / "out.txt", folder / "boot.txt")
            assert not worker.wait(), (folder / "boot.txt").read_text()
            return (folder / "out.txt").read_text().strip()
        print(shown(), flush=True)
        while begin.warm_up(command, given) and not begin.reads_orders:
            time.sleep(0.01)
        print(shown(), flush=True)
try:
    launch()
    sys.exit()
except ServesForks as fork:
    serve = fork.serve
serve("strict", "backslashreplace")
"""
SHOWS = """
import json, os, sys
before = set(sys.modules)
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2)).sum().backward()
optimizer.step()
imported = [name for name in set(sys.modules) - before if name.startswith("torch")]
files = os.listdir("/proc/self/fd")
print(json.dumps({"forked": "launches.py" in sys.orig_argv, "imported": imported, "files": files}))
"""


@pytest.mark.processes
def test_a_fork_of_a_warm_server_has_imported_what_torch_imports_late(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOWS)
    (tmp_path / "launches.py").write_text(WARMS_UP)
    real = str(Path(servers.__file__).parents[2])  # without what the suite puts in the place of torch._dynamo
    given = of_this_checkout() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": real}
    done = subprocess.run(
        [sys.executable, "launches.py"],
        cwd=tmp_path, env=given, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(json.loads, done.stdout.splitlines())
    assert before["forked"]
    assert after["forked"]
    assert "torch._dynamo" in before["imported"]
    assert len(after["imported"]) < len(before["imported"]) / 100
    assert len(before["files"]) == len(after["files"])
