"""Killed workers: the error says why and how to go on, and a resumed run ends where an undisturbed one ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.paths import EXAMPLES

from gossamer.checkpoint import digest, flatten, read

pytestmark = pytest.mark.processes

EXAMPLE = EXAMPLES / "bytelm.py"
GOSSAMER = [sys.executable, "-c", "from gossamer.cli.main import main; main()"]
OPTIONS = ["--workers", "2", "--recipe", "TopK(density=0.05)", "--logs", "logs"]
TRAINING = ["train.py", "--steps", "12", "--checkpoint", "kept", "--checkpoint-every", "4"]
# The example, with a worker that stands still after its first checkpoint for as long as there is a file `victim`
SCRIPT = f"""
import os, runpy, signal
from pathlib import Path
from gossamer import events

def tell(event):
    match event:
        case events.Saved(step=step):
            print("saved", step)
            if os.environ["RANK"] == "1" and Path("victim").exists():
                signal.pause()
        case events.Closed(digest=digest):
            print("digest", digest)

events.subscribe(tell)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@contextmanager
def started(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    (directory / "victim").touch()
    with subprocess.Popen(
        [*GOSSAMER, "run", *OPTIONS, *options, *TRAINING],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        try:
            yield launcher
        finally:
            launcher.kill()


def kill_after_first_checkpoint(directory: Path, launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdout is not None
    while (line := launcher.stdout.readline()) != "[rank 1] saved 4\n":
        assert line, "the run ended before its first checkpoint"
    (directory / "victim").unlink()
    header = (directory / "logs" / "rank-1.log").read_text().splitlines()[0]
    found = re.match(r"# rank 1 host \S+ pid (\d+) started ", header)
    assert found, header
    os.kill(int(found[1]), signal.SIGKILL)


def run(directory: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [*GOSSAMER, *arguments], cwd=directory, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def digests(said: str) -> list[str]:
    """Of the parameters, at the end, on both workers."""
    return re.findall(r"^\[rank \d\] digest (\w+)$", said, re.MULTILINE)[-2:]


def checkpoint(directory: Path, step: int) -> list[str]:
    """What the two workers need to go on: parameters, optimizer, residuals, positions in the data.

    Not the state of the random generators: nobody seeds Python's, and the example draws nothing after its beginning.
    Nor what each run measured of its links: two workers' sums are the same whichever way they go.
    """
    found = []
    for rank in range(2):
        tree, _ = read(directory / "kept", step, rank)
        rest, tensors = flatten(tree | {"random": None, "session": tree["session"] | {"links": ""}})
        found += [rest, *(f"{rank} {name} {digest([tensor])}" for name, tensor in tensors.items())]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "train.py").write_text(SCRIPT)
    said = run(directory, ["run", *OPTIONS, *TRAINING])
    assert any("exp_avg" in line for line in checkpoint(directory, 12))
    assert any("residual" in line for line in checkpoint(directory, 12))
    assert checkpoint(directory, 8) != checkpoint(directory, 12)
    return digests(said), checkpoint(directory, 12)


def test_the_command_that_a_killed_run_prints_resumes_it(
    tmp_path: Path, undisturbed: tuple[list[str], list[str]]
) -> None:
    directory = tmp_path / "killed"
    with started(directory) as launcher:
        kill_after_first_checkpoint(directory, launcher)
        killed = time.monotonic()
        _, said = launcher.communicate(timeout=30)
        assert time.monotonic() - killed < 5
    assert launcher.returncode == 137
    assert "rank 1 failed: it ended with signal SIGKILL" in said
    assert "A checkpoint of step 4 is in kept." in said
    assert "Traceback" not in said
    program, *command = shlex.split(said.strip().splitlines()[-1])
    assert program == "gossamer"
    resumed = run(directory, command)
    assert "saved 4" not in resumed
    assert (digests(resumed), checkpoint(directory, 12)) == undisturbed


def test_a_run_that_may_restart_resumes_by_itself(tmp_path: Path, undisturbed: tuple[list[str], list[str]]) -> None:
    directory = tmp_path / "restarted"
    with started(directory, "--max-restarts", "1") as launcher:
        kill_after_first_checkpoint(directory, launcher)
        resumed, said = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, said
    assert "rank 1 failed: it ended with signal SIGKILL" in said
    assert "Restarting all workers (1 of at most 1)" in said
    assert "saved 4" not in resumed.replace("[rank 0] saved 4", "", 1)  # which may be heard after rank 1's
    assert (digests(resumed), checkpoint(directory, 12)) == undisturbed
