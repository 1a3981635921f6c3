"""The first launcher of an elastic run is killed, and the same command is written again, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.elastic_launches import WORKER, MemberRun

from gossamer.comm.environment.run_token import make_token
from gossamer.launcher.elastic_run import NO_WAY_BACK
from gossamer.launcher.served_run import free_endpoints

pytestmark = pytest.mark.processes

MEMBER = """
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.elastic.agent import MembershipAgent, read_address
agent = MembershipAgent(
    read_address(os.environ["GOSSAMER_COORDINATOR"]), run_token(), number=int(os.environ["GOSSAMER_MEMBER"])
)
agent.here(("127.0.0.1", 1))
if agent.formed:
    agent.ready('{}')
view = agent.view_after(0, 60)
agent.caught_up() if agent.formed else agent.attached('{}')
reach("attached")
if not agent.formed:
    tell("begun")
    signal.pause()
before = view.numbers
is_survivor = not os.path.exists(os.path.join(here, "killed"))
if is_survivor:
    tell("joined")
    while view.world != 2 or view.numbers == before:
        view = agent.view_after(view.number, 60)
print("survived" if is_survivor else "came later", flush=True)
agent.leave(finished=True), agent.close()
"""


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def test_promise_22_the_same_command_continues_the_run_of_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """One worker beside the coordinator, and one of another launcher, whose process outlives the first launcher."""
    (endpoint,) = free_endpoints("127.0.0.1", 1)
    make_token(tmp_path / "token")
    (tmp_path / "script.py").write_text(WORKER + MEMBER)
    common = [sys.executable, "-m", "gossamer", "run", "--token-file", "token"]
    first = [*common, "--workers", "1:2:1", "--listen", endpoint, str(tmp_path / "script.py")]

    def start(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    started = [start(*first)]
    try:
        wait_for(tmp_path / "begun", started[0])
        started.append(start(*common, "--join", endpoint, "--workers", "1", str(tmp_path / "script.py")))
        wait_for(tmp_path / "joined", started[1])
        (tmp_path / "killed").touch()
        started[0].send_signal(signal.SIGKILL)
        started[0].communicate()
        started.append(start(*first))
        survivor, again = (each.communicate(timeout=150)[0] for each in started[1:])
        assert [each.returncode for each in started[1:]] == [0, 0], survivor + again
        assert "survived" in survivor
        assert "so it continues" in again
        assert "came later" in again
        assert not list((tmp_path / "runs").glob(".coordinator-journal-*"))
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.communicate()


def test_a_launcher_that_the_same_command_would_not_continue_says_so(tmp_path: Path) -> None:
    """The port and the token are new in each start."""
    run = MemberRun(tmp_path)
    run.coordinator.address = "192.0.2.1", 7
    assert run("pass", interface="lo").exit_code == 0
    assert run.notes[1] == NO_WAY_BACK
