"""Stop requests: loops end themselves, or every rank leaves its epoch, its block or, without one, the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import environment, succeed
from support.sessions import sgd
from support.virtual_workers import Worker, agree, cluster, loss_of, network, notices, parameters
from torch import Tensor

from gossamer.errors import Stopped
from gossamer.train.session.session import Session

RECIPES = ["Dense()", "TopK(0.3)", "EveryStep(delay=1)", "LocalSGD(period=2)", "Gossip() + Ring()"]


def trained(worker: Worker, recipe: str, *, below: list[int]) -> Any:
    model = network(0)
    with worker.attach(model, sgd(model), recipe) as session:
        for step in range(50):
            if worker.rank == worker.world - 1 and step == 3:
                session.request_stop()
            loss_of(model, step, worker.rank).backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        pytest.fail("nobody stopped")
    below.append(worker.rank)
    return session.steps


def check_all_go_on(recipe: str, world: int) -> None:
    below: list[int] = []
    steps = cluster(lambda worker: trained(worker, recipe, below=below), world)
    assert sorted(below) == list(range(world))
    assert len({*steps}) == 1
    assert 3 <= steps[0] <= 8


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [1, 3])
def test_the_script_continues_below_the_block(recipe: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_go_on(recipe, world)

    def leaves_it_to_others(self: Session, kind: Any, *_: object) -> None:
        self._end("finished")

    monkeypatch.setattr(Session, "__exit__", leaves_it_to_others)
    with pytest.raises(Stopped):
        check_all_go_on(recipe, world)


def test_another_sessions_end_is_not_taken_for_ones_own() -> None:
    def work(worker: Worker) -> list[str]:
        said = []
        outer, inner = network(0), network(1)
        with worker.attach(outer, sgd(outer)) as first:
            with worker.attach(inner, sgd(inner)):
                first.request_stop()
                for step in range(2):
                    loss_of(outer, step, worker.rank).backward()
                    first.optimizer.step()
                said.append("within")
            said.append("between")
        said.append("below")
        return said

    assert cluster(work, 2) == [["below"], ["below"]]


def epochs(worker: Worker, session: Session, steps: int, below: list[str], folder: Path | None = None) -> None:
    """As README has it: epochs, with what is saved below each. Rank 1 asks for the end in the first one's step 4."""
    for epoch in range(3):
        with session.epoch():
            for step in range(steps):
                if step == 4 and worker.rank == 1:
                    session.request_stop()
                loss_of(session.model, step, worker.rank).backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
        below.append(f"epoch {epoch}")
        if folder is not None:
            session.save(folder, epoch=epoch)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.3)", "EveryStep(delay=1)", "LocalSGD(period=2)"])
def test_what_stands_below_the_epoch_runs_and_no_other_epoch_begins(recipe: str, block: bool, tmp_path: Path) -> None:
    """A rank without data hears of it, too, and has the others' parameters; the last save is not lost."""

    def work(worker: Worker) -> Any:
        model, below = network(worker.rank), []
        session = worker.attach(model, sgd(model), recipe)
        with session if block else pytest.raises(Stopped):
            epochs(worker, session, 20 if worker.rank else 1, below, tmp_path)
        return session.steps, below, parameters(model)

    def resumed(worker: Worker) -> Tensor:
        model = network(5)
        assert worker.attach(model, sgd(model), recipe).load(tmp_path) == {"epoch": 0}
        return parameters(model)

    results = cluster(work, 2)
    assert [below for _, below, _ in results] == [["epoch 0"]] * 2
    assert len({steps for steps, *_ in results}) == 1
    assert results[0][0] <= 8
    agree([ended for *_, ended in results])
    agree([results[0][2], *cluster(resumed, 2)])


def broken_off(worker: Worker, recipe: str) -> tuple[int, int, Tensor]:
    """Steps that were made where a loop ends itself, and parameters."""
    model = network(0)
    session = worker.attach(model, sgd(model), recipe)
    made = 0
    while not session.should_stop:
        if worker.rank == worker.world - 1 and made == 3:
            session.request_stop()
        loss_of(model, made, worker.rank).backward()
        assert not session.should_stop, "the step of this pass would be left out"
        session.optimizer.step()
        session.optimizer.zero_grad()
        made += 1
    return made, session.steps, parameters(model)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [1, 3])
def test_a_loop_that_asks_ends_itself_on_every_rank_after_the_same_step(recipe: str, world: int) -> None:
    results = cluster(lambda worker: broken_off(worker, recipe), world)
    assert len({made for made, *_ in results}) == 1
    assert all(made == steps for made, steps, _ in results)
    if "Every" in recipe or "(" not in recipe:
        agree([ended for *_, ended in results])


def test_a_step_that_is_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin knows of the end in the pass before the step."""
    monkeypatch.setattr(Session, "should_stop", property(lambda self: self._synchronizer.stopping))
    with pytest.raises(AssertionError, match="left out"):
        cluster(lambda worker: broken_off(worker, "Dense()"), 2)


# -- without a block ---------------------------------------------------------------------------------------------------

ENDS_EARLY = """
import sys
import torch
import gossamer
from gossamer import events
from gossamer.events import Closed

world = gossamer.init()
events.subscribe(lambda event: print("closed after", event.steps) if isinstance(event, Closed) else None)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
for step in range(50):
    model(torch.randn(8, 8)).square().mean().backward()
    if world.rank == world.size - 1 and step == 7:
        session.request_stop()
    optimizer.step()
print("below the loop")
"""


def stop(worker: Worker, *, block: bool) -> None:
    model = network(0)
    session = worker.attach(model, sgd(model))
    if block:
        session.__enter__()
    for step in range(5):
        if worker.rank == 1 and step == 1:
            session.request_stop()
        loss_of(model, step, worker.rank).backward()
        session.optimizer.step()


@pytest.mark.parametrize("block", [False, True])
def test_a_script_that_ends_here_reports_it_once(block: bool) -> None:
    with notices() as said, pytest.raises(Stopped) as stopped:
        cluster(lambda worker: stop(worker, block=block), 2)
    assert stopped.value.code is None, "the interpreter would not end well"
    assert ["`if session.should_stop: break`" in line for line in said] == [True] * (not block)


def ended(text: str) -> bool:
    assert "below the loop" not in text
    return any(f"closed after {steps}" in text for steps in (8, 9))


@pytest.mark.processes
def test_whoever_launched_it_the_script_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDS_EARLY)
    for world in (1, 2):  # as torchrun does
        assert all(map(ended, succeed([str(script)], world)))
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2", "--logs", str(tmp_path / "logs"), str(script)]
    mine = {name: value for name, value in environment(0, 2, 0).items() if "RANK" not in name}
    done = subprocess.run(command, env=mine, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(ended(log.read_text()) for log in (tmp_path / "logs").glob("rank-*.log"))
