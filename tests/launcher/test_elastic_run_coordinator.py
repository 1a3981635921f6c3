"""Elastic runs with the real coordinator: workers' agents, losses, and newcomers of a second launcher."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.elastic_launches import MemberRun

from gossamer.base.run_files import RunFiles
from gossamer.comm.elastic.agent import read_address
from gossamer.comm.elastic.remote_control import resize
from gossamer.launcher.elastic_run import coordinate_run
from gossamer.launcher.failure import Outcome

pytestmark = pytest.mark.processes

MEMBER = """
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.elastic.agent import MembershipAgent, read_address
LIKE = '{"recipe": "Dense()"}'
agent = MembershipAgent(
    read_address(os.environ["GOSSAMER_COORDINATOR"]), run_token(), place=int(os.environ["GOSSAMER_PLACE"]),
    number=int(os.environ["GOSSAMER_MEMBER"]), dead_after_seconds=20.0,
)
agent.here(("127.0.0.1", 1 + place))
if agent.formed:
    agent.ready(LIKE)
    view = agent.view_after(0, 60)
    agent.caught_up()
else:
    view = agent.first_view(60)
    agent.attached(LIKE)
reach("attached")
def until(world):
    global view
    while view.world != world:
        view = agent.view_after(view.number, 60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MemberRun]:
    run = MemberRun(tmp_path, coordinate=coordinate_run)
    yield run
    for number in range(6):
        if started := RunFiles(run.private).newest_start(number):
            assert not Path(f"/proc/{started['pid']}").exists(), "a process outlived its run"


def test_a_lost_worker_comes_back_while_the_other_continues(run: MemberRun) -> None:
    outcome = run(
        MEMBER
        + """
if place == 1 and not attempt:
    os.kill(os.getpid(), signal.SIGKILL)
if place == 0:
    until(1)
until(2)
print(view.rank_of(agent.number), view.number)
tell(f"there-{place}"), wait_for("there-0"), wait_for("there-1")
agent.leave(finished=True), agent.close()
""",
        max_restarts=1,
    )
    assert outcome == Outcome(restarts=1), run.lines
    # Where a busy machine takes its time to start the second, the first says every ten seconds what it waits for
    assert sorted(line for line in run.lines if "has waited" not in line[1]) == [(0, "0 3"), (1, "1 3")]
    notes = [note for note in run.notes if "The run has been waiting" not in note]
    assert notes[0] == "rank 1 was lost (signal SIGKILL). The other one continues; restarting it (1 of at most 1)."
    assert not any("is over" in note for note in run.notes), "who finishes is no news"


def test_workers_of_another_launcher_come_in_and_the_newest_is_evicted(run: MemberRun, tmp_path: Path) -> None:
    """`gossamer run --join` beside the first launcher, then `gossamer resize`."""
    joined: list[subprocess.Popen[str]] = []
    asked: list[str] = []

    def tick() -> None:
        if (tmp_path / "alone").exists() and not joined:
            (tmp_path / "token").write_bytes((run.private / "token").read_bytes())
            (tmp_path / "token").chmod(0o600)
            address = (tmp_path / "alone").read_text()
            joined.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "gossamer", "run", "--workers", "1", "--logs", "joined"),
                        *("--join", address, "--token-file", "token", str(tmp_path / "script.py")),
                    ],
                    cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
        if (tmp_path / "together").exists() and not asked:
            token = hashlib.sha256((tmp_path / "token").read_bytes()).digest()
            asked.append(resize(read_address((tmp_path / "alone").read_text()), token, 1))

    run.tick = tick
    outcome = run(
        MEMBER
        + """
from gossamer.errors import Stopped
if agent.formed:
    tell("together")
    try:
        agent.view_after(view.number, 60)
    except Stopped:
        reach("left")
        raise SystemExit(0)
with open(os.path.join(here, "alone.draft"), "w") as file:
    file.write(os.environ["GOSSAMER_COORDINATOR"])
os.rename(os.path.join(here, "alone.draft"), os.path.join(here, "alone"))
until(2)
until(1)
print("alone again")
agent.leave(finished=True), agent.close()
""",
        range_="1:2",
        workers=1,
    )
    assert outcome == Outcome(), run.lines
    assert run.lines[-1] == (0, "alone again")
    said = joined[0].communicate(timeout=200)[0]
    assert joined[0].returncode == 0, said
    assert "resized to 1 workers" in said
    assert "rank 0 has left the run. The run continues without it." in said
    assert asked == ["at most 1 workers from now on (before: 2); the newest 1 of 2 are evicted"]
    assert run.sizes[0] == (1, 1)  # of two there was one moment, which only what was answered tells for certain
