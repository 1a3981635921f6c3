from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from support.processes import engine_files_left_open, eventually, has_ended
from support.signals import check_ignored_hangup

from gossamer.base.run_files import RUN_DIRECTORY
from gossamer.errors import ConnectError
from gossamer.launcher.failure import Origin, Outcome
from gossamer.launcher.fixed_run import launch
from gossamer.launcher.job import OF_A_RUN, OF_A_WORKER, Job
from gossamer.launcher.process import FAILURE_GRACE_SECONDS

pytestmark = pytest.mark.processes


@dataclass
class Run:
    """Launches scripts, and keeps what was shown."""

    directory: Path
    lines: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tick: Callable[[], None] = lambda: None

    def __call__(self, script: str, *arguments: str, **changes: Any) -> Outcome:
        path = self.directory / "script.py"
        path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + dedent(script))
        private = self.directory / "private"
        private.mkdir()
        job = Job(script=path, arguments=arguments, logs=self.directory / "logs", **changes)
        began = time.monotonic()
        try:
            with engine_files_left_open():
                return launch(
                    job,
                    private,
                    show=lambda rank, line: self.lines.append((rank, line)),
                    note=self.notes.append,
                    tick=lambda: self.tick(),
                )
        finally:
            self.seconds = time.monotonic() - began

    def log(self, rank: int) -> str:
        return (self.directory / "logs" / f"rank-{rank}.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_script_runs_as_under_plain_python(run: Run) -> None:
    (run.directory / "sibling.py").write_text("value = 7")
    outcome = run(
        """
        import sibling
        print(__name__, sys.argv[1:], sibling.value)
        print("aside", file=sys.stderr)
        print("no end of line", end="")
        """,
        "--rate",
        "$$x ${local_rank}",
    )
    assert outcome == Outcome()
    said = ["__main__ ['--rate', '$$x ${local_rank}'] 7", "aside", "no end of line"]
    assert [line for rank, line in run.lines if rank == 0] == said
    assert [line for rank, line in run.lines if rank == 1] == said


def test_a_run_within_a_run_knows_only_its_own_place(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = [*OF_A_WORKER, *OF_A_RUN]
    for name in (*outer, RUN_DIRECTORY, "GOSSAMER_TIMEOUT"):
        monkeypatch.setenv(name, "77")
    run(
        f"""
        places = {{name: os.environ[name] for name in {outer} if name in os.environ}}
        print(places, os.environ["{RUN_DIRECTORY}"] == "77", os.environ["GOSSAMER_TIMEOUT"])
        """
    )
    own = [{"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"} for rank in "01"]
    assert sorted(run.lines) == [(rank, f"{own[rank]} False 77") for rank in (0, 1)]


def test_the_first_real_error_is_the_cause_and_its_traceback_is_the_users(run: Run) -> None:
    outcome = run(
        """
        def work():
            if rank == 1:
                raise ValueError("bad data")
            time.sleep(60)
        work()
        """,
        workers=3,
    )
    failure = outcome.failure
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.summary) == (1, 1, "ValueError: bad data")
    assert failure.traceback.splitlines()[1].endswith('script.py", line 8, in <module>')
    assert "runpy" not in failure.traceback
    assert "gossamer" not in failure.traceback
    assert run.log(1).count("ValueError: bad data") == 1
    assert "Traceback" not in "".join(line for _, line in run.lines)
    assert run.seconds < 30


def test_a_lost_peer_is_never_the_cause(run: Run) -> None:
    outcome = run(
        """
        import atexit
        from pathlib import Path
        from gossamer.errors import PeerLost
        from gossamer.base.run_files import RunFiles
        def wait_for_report(other):
            while not RunFiles(Path(os.environ["GOSSAMER_RUN_DIRECTORY"])).failure(other, 0).exists():
                time.sleep(0.01)
        if rank == 0:
            atexit.register(wait_for_report, 1)  # the end of either would end the other
            raise PeerLost("another worker left")
        wait_for_report(0)
        raise ZeroDivisionError("the cause")
        """
    )
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.origin) == (1, Origin.RAISED)


def test_a_killed_worker_is_named_and_stubborn_ones_do_not_delay_the_end(run: Run) -> None:
    outcome = run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 2:
            print("last words", time.time(), flush=True)
            os.kill(os.getpid(), 9)
        time.sleep(60)
        """,
        workers=3,
    )
    ended = time.time()
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.exit_code) == (2, 137)
    ((rank, ops),) = run.lines
    assert rank == 2
    assert ended - float(ops.split()[-1]) < 4 * FAILURE_GRACE_SECONDS  # the engine's own patience is 30 s
    assert "rank 0 was stopped" in run.log(0)


def test_a_worker_that_was_asked_alone_to_end_is_blamed_and_not_who_met_it(run: Run) -> None:
    os.mkfifo(run.directory / "life")
    outcome = run(
        """
        from pathlib import Path
        from gossamer.errors import PeerLost
        life = Path(__file__).with_name("life")
        if rank == 1:
            held = life.open("w")
            os.kill(os.getpid(), signal.SIGTERM)
        if rank == 0:
            life.read_text()  # until rank 1 is no more
            raise PeerLost("a worker left")
        time.sleep(60)
        """,
        workers=3,
    )
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.exit_code) == (1, 143)
    assert "rank 2 was stopped (signal SIGTERM)" in run.log(2)


def test_a_worker_that_was_asked_alone_to_end_is_blamed_while_it_still_imports(run: Run) -> None:
    (run.directory / "importing.py").write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)"
    )
    outcome = run("", workers=3, worker_module="importing", settings={"PYTHONPATH": str(run.directory)})
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.origin, outcome.exit_code) == (2, Origin.KILLED, 143)
    assert "rank 0 was stopped (signal SIGTERM)" in run.log(0)


def stop_once_all_are_here(run: Run, number: signal.Signals, workers: int = 2) -> None:
    """Send the launcher this signal once each worker has printed a line."""
    sent: list[int] = []

    def tick() -> None:
        if len(run.lines) == workers and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    run.tick = tick


def test_ctrl_c_interrupts_the_scripts_and_waits_for_each_to_save(run: Run) -> None:
    stop_once_all_are_here(run, signal.SIGINT)
    outcome = run(
        """
        from pathlib import Path
        gone = Path(__file__).with_name("gone")
        try:
            print("here")
            time.sleep(60)
        except KeyboardInterrupt:
            if rank == 0:
                gone.touch()
                raise
            while not gone.exists():
                pass
            time.sleep(0.5)  # rank 0 has ended long before
            print("saved")
        """
    )
    assert (outcome.signal, outcome.failure, outcome.exit_code) == (signal.SIGINT, None, 130)
    assert sorted(run.lines) == [(0, "here"), (1, "here"), (1, "saved")]
    (note,) = run.notes
    assert note.startswith("waiting up to 30 s")


def test_ranks_that_are_interrupted_in_different_steps_save_after_the_same(run: Run) -> None:
    outcome = run(
        """
        import torch, gossamer
        world = gossamer.init()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = gossamer.attach(model, optimizer, record=False)
        try:
            for step in range(1000):
                if step == 5 - rank:
                    open(os.path.join(os.environ["GOSSAMER_RUN_DIRECTORY"], "interrupted"), "w").close()
                    os.kill(os.getpid(), signal.SIGINT)
                model(torch.randn(4, 2) + rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except KeyboardInterrupt:
            session.save(os.path.join(os.path.dirname(__file__), "kept"))
            print("saved after", session.steps)
        """
    )
    assert outcome == Outcome()
    after = [line for _, line in run.lines]
    assert after in (["saved after 5"] * 2, ["saved after 6"] * 2)


def test_sigterm_is_sigterm_to_the_scripts(run: Run) -> None:
    stop_once_all_are_here(run, signal.SIGTERM)
    outcome = run(
        """
        def save(*_):
            print("saved")
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        print("here")
        time.sleep(60)
        """
    )
    assert outcome.exit_code == 143
    assert sorted(run.lines) == [(rank, text) for rank in (0, 1) for text in ("here", "saved")]


def test_a_sighup_that_is_ignored_ends_nothing(run: Run) -> None:
    script = """
        print("here")
        while not os.path.exists(os.path.join(os.path.dirname(__file__), "hung-up")):
            time.sleep(0.01)
        """
    check_ignored_hangup(run, lambda: run(script, workers=1))


def test_helpers_of_workers_last_until_these_have_saved_and_no_longer(run: Run) -> None:
    stop_once_all_are_here(run, signal.SIGINT, workers=1)
    run(
        """
        import subprocess
        helper = subprocess.Popen(["sleep", "60"])
        try:
            print("here")
            time.sleep(60)
        except KeyboardInterrupt:
            print(helper.pid, helper.poll())
        """,
        workers=1,
    )
    pid, state = run.lines[1][1].split()
    assert state == "None"
    assert eventually(lambda: has_ended(int(pid)))


def test_exit_codes_of_the_script_are_kept(run: Run) -> None:
    assert run("sys.exit(7 if rank else 0)").exit_code == 7


def test_sys_exit_with_a_text_prints_it(run: Run) -> None:
    assert run("sys.exit('not enough data')", workers=1).exit_code == 1
    assert run.lines == [(0, "not enough data")]


def test_a_script_that_cannot_be_read_fails_with_its_own_line(run: Run) -> None:
    outcome = run("x = (", workers=1)
    assert outcome.failure is not None
    assert "SyntaxError" in outcome.failure.summary
    assert "runpy" not in outcome.failure.traceback


def test_restarts_start_everyone_again(run: Run) -> None:
    outcome = run(
        """
        from pathlib import Path
        attempt, said = os.environ["TORCHELASTIC_RESTART_COUNT"], Path(__file__).with_name("said")
        print("attempt", attempt)
        if attempt == "0" and rank == 1:
            while not said.exists():
                time.sleep(0.01)
            raise ValueError("once")
        if attempt == "0":
            said.touch()
            time.sleep(60)
        """,
        max_restarts=2,
    )
    assert outcome == Outcome(restarts=1)
    assert sorted(run.lines) == [(rank, f"attempt {attempt}") for rank in (0, 1) for attempt in (0, 1)]
    (note,) = run.notes
    assert note.startswith("rank 1 failed: ValueError: once")
    assert "Restarting all workers (1 of at most 2)" in note


LISTENERS = """
lines = open("/proc/net/tcp").read().splitlines()[1:] + open("/proc/net/tcp6").read().splitlines()[1:]
port = f"{int(os.environ['MASTER_PORT']):04X}"
print(*(fields[1].split(":")[0] for fields in map(str.split, lines) if fields[3] == "0A" and fields[1].endswith(port)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads listening sockets as Linux lists them")
def test_on_one_machine_nobody_listens_but_on_loopback(run: Run) -> None:
    assert run(LISTENERS, workers=1) == Outcome()
    assert run.lines == [(0, "0100007F")]


def test_workers_meet_only_if_they_have_the_runs_secret(run: Run) -> None:
    outcome = run(
        """
        import gossamer
        mode = os.stat(os.environ["GOSSAMER_TOKEN_FILE"]).st_mode & 0o777
        print(len(os.environ["GOSSAMER_RUN"]), oct(mode))
        if rank == 1:
            del os.environ["GOSSAMER_TOKEN_FILE"]
            gossamer.init()
        time.sleep(60 if rank else 0)
        gossamer.init()
        """
    )
    assert [line for rank, line in run.lines if rank == 1] == ["16 0o600"]
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert "it cannot prove that it belongs to this run" in outcome.failure.summary
    assert any("was refused at the meeting" in line for rank, line in run.lines if rank == 0)


def test_promise_14_a_place_to_meet_that_is_taken_is_refused_at_once(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConnectError, match="is in use"):
        run("", rendezvous=f"127.0.0.1:{taken.getsockname()[1]}")
    assert run.seconds < 20  # it would wait for half an hour


def test_an_error_while_showing_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('x')\ntime.sleep(60)")
    (tmp_path / "private").mkdir()

    def show(rank: int, line: str) -> None:
        raise BrokenPipeError("nobody reads")

    job = Job(script=script, workers=1, logs=tmp_path)
    with pytest.raises(BrokenPipeError), engine_files_left_open():
        launch(job, tmp_path / "private", show=show, note=print, tick=lambda: None)
