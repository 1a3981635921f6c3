"""Killed workers: the error says why and how to go on, and a resumed run ends where an undisturbed one ends."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.paths import EXAMPLES

from gossamer.train.checkpoint import digest, flatten, read

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
    """Of both: who is ended while it saves has none."""
    assert launcher.stdout is not None
    missing = {f"[rank {rank}] saved 4\n" for rank in range(2)}
    while missing:
        line = launcher.stdout.readline()
        assert line, "the run ended before its first checkpoint"
        missing.discard(line)
    (directory / "victim").unlink()
    header = (directory / "logs" / "rank-1.log").read_text().splitlines()[0]
    found = re.match(r"# rank 1 host \S+ pid (\d+) started ", header)
    assert found, header
    os.kill(int(found[1]), signal.SIGKILL)


def run(directory: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [*GOSSAMER, *arguments], cwd=directory, capture_output=True, text=True, timeout=200, check=False
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
        _, said = launcher.communicate(timeout=200)
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
        resumed, said = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, said
    assert "rank 1 failed: it ended with signal SIGKILL" in said
    assert "Restarting all workers (1 of at most 1)" in said
    assert "saved 4" not in resumed
    assert (digests(resumed), checkpoint(directory, 12)) == undisturbed


# A worker whose directory is its own machine's; what it ends with is printed
OWN_DIRECTORY = """
import os, sys, torch
import gossamer
from gossamer import events

world = gossamer.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
events.subscribe(lambda event: print("digest", event.digest) if isinstance(event, events.Closed) else None)
with gossamer.attach(model, optimizer, sys.argv[1]) as session:
    session.load(f"machine-{world.rank}")
    print("began at", session.steps)
    for step in range(session.steps, int(sys.argv[2])):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + world.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            session.save(f"machine-{world.rank}", replicas=1, asynchronous=True)
"""


def test_a_machine_that_is_lost_with_its_disk_is_made_up_for(tmp_path: Path) -> None:
    """Three processes, three directories; one is gone when the run is started again."""

    def trained(directory: Path, steps: int) -> str:
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text(OWN_DIRECTORY)
        return run(directory, ["run", "--workers", "3", "train.py", "TopK(density=0.2)", str(steps)])

    whole = digests(trained(tmp_path / "whole", 8))
    trained(tmp_path / "lost", 4)
    shutil.rmtree(tmp_path / "lost" / "machine-1")
    resumed = trained(tmp_path / "lost", 8)
    assert resumed.count("began at 4") == 3
    assert digests(resumed) == whole


@pytest.mark.nightly
def test_dedicated_servers_are_given_back_what_they_had(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_DIRECTORY)
    arguments = ["run", "--workers", "2", "--servers", "1", "train.py", "ParameterServer(mode='sync')"]
    whole = digests(run(tmp_path, [*arguments, "8"]))
    for machine in range(2):
        shutil.rmtree(tmp_path / f"machine-{machine}")
    run(tmp_path, [*arguments, "4"])
    resumed = run(tmp_path, [*arguments, "8"])
    assert resumed.count("began at 4") == 2
    assert digests(resumed) == whole
