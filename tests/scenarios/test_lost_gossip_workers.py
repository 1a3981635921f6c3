"""A worker of pairwise gossip is killed while it trains, and comes back: real processes, by `gossamer run`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.distributed import HashStore, PrefixStore

from gossamer.cli.main import gossamer
from gossamer.comm.environment import worker_registry
from gossamer.launcher.failure import Outcome
from gossamer.launcher.fixed_run import launch
from gossamer.launcher.job import Job
from gossamer.launcher.process import ManagedProcess
from gossamer.launcher.served_run import ServedRun

RECIPE = "Gossip('pairwise')"

# Every gradient is 1 and so is the learning rate: whoever trains goes down from 0, and a fresh model would be at 5000
TRAINING = """
import os, signal, sys
from pathlib import Path
import torch
import gossamer
from gossamer.base.run_files import RunFiles

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
files = RunFiles(Path(os.environ["GOSSAMER_RUN_DIRECTORY"]))
model = torch.nn.Linear(1, 1, bias=False)
model.register_buffer("seen", torch.zeros(1) + 7 * rank + 100 * attempt)
torch.nn.init.constant_(model.weight, 5000.0 * (rank + attempt))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
session = gossamer.attach(model, optimizer)

def tell(name, *what):
    with open(name, "a") as file:
        print(*what, file=file)

def step():
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tell(f"steps-{rank}-{attempt}", session.steps)

tell("begun", rank, attempt, model.weight.item(), model.seen.item(), session.steps)
if attempt:
    for _ in range(5):
        step()
    tell("back")
elif rank:
    while True:
        step()
else:
    while not os.path.exists("steps-1-0") or len(open("steps-1-0").readlines()) < 3:
        step()
    os.kill(files.newest_start(1)["pid"], signal.SIGKILL)
    while not os.path.exists("back"):
        step()
session.close()
tell("ended", rank, attempt, model.weight.item())
"""


@dataclass(frozen=True)
class Seen:
    """What a run left. begun: weight, buffer and steps at attach, by rank and attempt; ended: the weight."""

    record: dict[str, Any]
    said: str
    begun: dict[tuple[int, int], tuple[float, float, int]]
    ended: dict[tuple[int, int], float]


def run(directory: Path) -> Seen:
    (directory / "train.py").write_text(TRAINING)
    options = ["--workers", "2", "--max-restarts", "1", "--recipe", RECIPE, "--json", "out.json"]
    done = CliRunner().invoke(gossamer, ["run", *options, "train.py"])
    assert done.exit_code == 0, done.output
    begun = [line.split() for line in (directory / "begun").read_text().splitlines()]
    ended = [line.split() for line in (directory / "ended").read_text().splitlines()]
    return Seen(
        record=json.loads((directory / "out.json").read_text()),
        said=done.output,
        begun={
            (int(rank), int(incarnation)): (float(w), float(seen), int(steps))
            for rank, incarnation, w, seen, steps in begun
        },
        ended={(int(rank), int(incarnation)): float(weight) for rank, incarnation, weight in ended},
    )


def check(seen: Seen) -> None:
    """It began from what the other had made meanwhile, and all ended with the same."""
    weight, buffer, steps = seen.begun[1, 1]
    assert weight < 0
    assert buffer == seen.begun[0, 0][1]
    assert steps > 0
    assert seen.ended.keys() == {(0, 0), (1, 1)}
    assert seen.ended[0, 0] == seen.ended[1, 1] < weight
    assert "rank 1 was lost (signal SIGKILL). Restarting it alone (1 of at most 1)." in seen.said
    assert "worker 1 returned and continues from the parameters of worker 0" in " ".join(seen.said.split())
    assert (seen.record["lost"], seen.record["workers_agree"]) == ([], True)


@pytest.mark.processes
def test_a_killed_worker_comes_back_to_what_its_neighbour_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = run(tmp_path)
    check(seen)
    for broken in (
        replace(seen, begun={**seen.begun, (1, 1): (10_000.0, 0.0, 0)}),  # its own, fresh
        replace(seen, ended={**seen.ended, (1, 1): seen.ended[1, 1] - 1}),
        replace(seen, record={**seen.record, "lost": [1]}),
    ):
        with pytest.raises(AssertionError):
            check(broken)


# -- who is started one by one -------------------------------------------------------------------------------------

# Starts in no time, unlike one that imports torch
TINY = "import runpy, sys\nscript, *sys.argv[1:] = sys.argv[1:]\nrunpy.run_path(script, run_name='__main__')\n"
DIES = """
import os, signal
if os.environ["RANK"] == "1":
    print(os.environ.get("GOSSAMER_REJOIN"), repr(os.environ.get("GOSSAMER_SERVERS")), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("go"):
    pass
"""


def launched(directory: Path, script: str, tick: Any = lambda heard: None, **job: Any) -> tuple[Outcome, list[Any]]:
    (directory / "tiny.py").write_text(TINY)
    (directory / "script.py").write_text(script)
    (directory / "private").mkdir()
    heard: list[Any] = []
    options = {"worker_module": "tiny", "settings": {"PYTHONPATH": str(directory)}, "recipe": RECIPE} | job
    outcome = launch(
        Job(script=directory / "script.py", logs=directory / "logs", **options),
        directory / "private",
        show=lambda rank, line: heard.append((rank, line)),
        note=heard.append,
        tick=lambda: tick(heard),
    )
    return outcome, heard


def let_go(heard: list[Any]) -> None:
    """Once the launcher has said that the others go on."""
    if any(isinstance(each, str) and each.endswith("continue.") for each in heard):
        Path("go").touch()


@pytest.mark.processes
def test_the_loss_of_a_neighbour_ends_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker_registry, "trains", lambda store, rank, attempt: True)
    outcome, heard = launched(tmp_path, DIES, let_go, workers=3, max_restarts=1)
    assert outcome == Outcome(restarts=1)
    assert [each for each in heard if isinstance(each, tuple)] == [(1, "None ''"), (1, "1 ''")]
    assert [each for each in heard if isinstance(each, str)] == [
        "rank 1 was lost (signal SIGKILL). Restarting it alone (1 of at most 1).",
        "rank 1 was lost (signal SIGKILL). The other 2 continue.",
    ]


STAYS = """
import os, signal
if os.environ["RANK"] == "1" and not os.environ.get("GOSSAMER_REJOIN"):
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("go"):
    pass
"""


def check_nobody_waits(directory: Path, monkeypatch: pytest.MonkeyPatch, **job: Any) -> None:
    """Worker 1 is lost before anybody has met: nobody can go on without it, nor it with anybody."""
    monkeypatch.chdir(directory)
    outcome, _ = launched(directory, STAYS, let_go, workers=3, **job)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.exit_code, outcome.restarts) == (1, -9, 0)
    assert "while no other worker trained" in outcome.failure.summary


@pytest.mark.processes
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_loss_before_all_have_met_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    check_nobody_waits(tmp_path, monkeypatch, max_restarts=restarts)


@pytest.mark.processes
def test_a_mutant_that_takes_workers_that_have_not_met_for_trained_ones_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedRun, "_is_stranding", False)
    with pytest.raises(AssertionError):
        check_nobody_waits(tmp_path, monkeypatch)


def test_only_the_start_that_said_so_trains() -> None:
    store = HashStore()
    said = PrefixStore(worker_registry.PLACES, store)
    assert not worker_registry.trains(store, 1, 0)
    said.set(f"{worker_registry.TRAINS}1", "1")
    assert [worker_registry.trains(store, 1, attempt) for attempt in (0, 1, 2)] == [False, True, False]
    assert not worker_registry.trains(store, 0, 1)


DIES_LAST = """
import os, signal
while os.environ["RANK"] == "1":
    if os.path.exists("go"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def check_nobody_returns_to_nobody(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 is lost once the launcher has seen that worker 0 came to the end."""
    ended = ServedRun._worker_ended

    def look(self: ServedRun, worker: ManagedProcess, exit_code: int, now: float) -> None:
        ended(self, worker, exit_code, now)
        Path("go").touch()

    monkeypatch.chdir(directory)
    monkeypatch.setattr(ServedRun, "_worker_ended", look)
    outcome, heard = launched(directory, DIES_LAST, workers=2, max_restarts=3)
    assert outcome == Outcome()
    assert heard == ["rank 1 was lost (signal SIGKILL). No worker is left to train."]


@pytest.mark.processes
def test_a_worker_that_is_lost_after_the_end_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_nobody_returns_to_nobody(tmp_path, monkeypatch)


@pytest.mark.processes
def test_a_mutant_that_starts_it_again_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedRun, "_has_way_back", True)
    with pytest.raises(AssertionError):
        check_nobody_returns_to_nobody(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("given", "alone"),
    [
        ({"recipe": RECIPE, "workers": 2}, True),
        ({"recipe": RECIPE + " + Ring()", "workers": 4}, True),
        ({"recipe": RECIPE, "workers": 1}, False),
        ({"recipe": "Gossip() + Ring()", "workers": 2}, False),
        ({"recipe": "ParameterServer()", "workers": 2}, False),
        ({"recipe": "Nonsense()", "workers": 2}, False),
        ({"recipe": None, "workers": 2}, False),
        ({"recipe": RECIPE, "workers": 2, "hosts": (Path("host-0"), Path("host-1"))}, False),
        ({"recipe": RECIPE, "workers": 2, "rendezvous": "127.0.0.1:1"}, False),
    ],
)
def test_which_runs_outlive_losses(given: dict[str, Any], alone: bool) -> None:
    assert Job(script=Path("train.py"), logs=Path(os.devnull), **given).outlives_losses is alone
