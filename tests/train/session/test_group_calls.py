"""Group calls outside of steps: a rank that makes one alone is refused with the others, who would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_workers
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network, notices, train_step

from gossamer.algorithms.compressors import Dense
from gossamer.base.layout import FlatTensors
from gossamer.comm.detached import DetachedTransport
from gossamer.errors import GossamerError, LoopError, MismatchError
from gossamer.train.session.average import AverageState
from gossamer.train.session.group_calls import newest_group
from gossamer.train.session.session import Session

RECIPES = [
    "Dense()",
    "TopK(0.1)",
    "EveryStep(accumulate=2)",
    "EveryStep(delay=1)",
    "LocalSGD(period=2)",
    "DiLoCo(period=2)",
    "Gossip() + Ring()",
]


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except GossamerError as error:
        return error
    return None


def alone(recipe: str, before: int, call: Callable[[Session, int], Any]) -> list[Exception | None]:
    """What each rank hears where rank 0 makes `call` after some steps and the other trains on."""

    def work(worker: Worker) -> Exception | None:
        model, optimizer, session = worker.start(network(0), sgd, recipe)

        def train(steps: range) -> None:
            for step in steps:
                train_step(model, optimizer, step, worker.rank)

        train(range(before))
        if worker.rank == 0:
            return raised(lambda: call(session, worker.rank))
        return raised(lambda: train(range(before, before + 5)))

    return cluster(work, 2)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rank_that_loads_is_refused_with_all(recipe: str, before: int, tmp_path: Path) -> None:
    for error in alone(recipe, before, lambda session, _: session.load(tmp_path)):
        assert isinstance(error, LoopError)
        assert "load()" in str(error)
        assert "rank 0 called" in str(error)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_ranks_may_load_before_any_step_and_after_some(recipe: str, tmp_path: Path) -> None:
    def work(worker: Worker, load: bool) -> torch.Tensor:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        for step in range(4):
            if load and step in (0, 3):
                assert session.load(tmp_path / "none") == {}
            train_step(model, optimizer, step, worker.rank)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    for loaded, whole in zip(*(cluster(lambda worker, x=x: work(worker, x), 2) for x in (True, False)), strict=True):
        assert torch.equal(loaded, whole)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)"])
def test_one_rank_that_averages_is_refused_with_all(recipe: str) -> None:
    def average(session: Session, rank: int) -> None:
        memory = AverageState(Dense(), session._transport)
        memory.run = session._group.run
        memory.average_(FlatTensors.pack({"x": torch.ones(3, dtype=torch.float64)}))

    assert [type(error) for error in alone(recipe, 2, average)] == [MismatchError] * 2


def test_averages_of_all_ranks_travel_among_steps() -> None:
    def work(worker: Worker) -> list[float]:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.1)")
        memory = AverageState(Dense(), session._transport)
        memory.run = session._group.run
        heard = []
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
            packed = FlatTensors.pack({"x": torch.full((2,), float(10 * step + worker.rank))})
            memory.average_(packed)
            heard.append(float(packed["x"][0]))
        return heard

    assert cluster(work, 2) == [[0.5, 10.5, 20.5]] * 2


def test_the_newest_open_group_is_taken() -> None:
    def work(worker: Worker) -> None:
        sessions = [worker.start(network(0), sgd)[2] for _ in range(2)]
        assert newest_group() is sessions[1]._group
        sessions[1].close()
        assert newest_group() is sessions[0]._group
        sessions[0].close()
        assert newest_group() not in [session._group for session in sessions]

    cluster(work, 1)


# -- with a worker that was lost --------------------------------------------------------------------------------------


class Answered:
    """A roll call of three ranks that is answered by some of them."""

    def __init__(self, found: dict[int, bytes]) -> None:
        self.found = found

    def gather(self, caller: str, form: str, value: bytes) -> dict[int, bytes]:
        return self.found


@pytest.mark.parametrize(
    ("found", "lacks"),
    [
        ({0: b"", 1: b"", 2: b""}, ""),
        ({0: b"", 1: b""}, "Lost, or restarted: rank 2."),
        ({0: b"", 1: b"detached", 2: b""}, "Lost, or restarted: rank 1."),
    ],
)
def test_nothing_is_saved_once_a_worker_is_lost(found: dict[int, bytes], lacks: str, tmp_path: Path) -> None:
    """Where the recipe outlives the loss: the run goes on, and one notice says so."""

    def work(worker: Worker) -> int:
        *_, session = worker.start(network(0), sgd)
        session._group.roll_call = lambda: Answered(found)  # type: ignore[assignment,return-value]
        for _ in range(2):
            session.save(tmp_path)
        return len(list(tmp_path.glob("step-*")))

    with notices() as told:
        counts = cluster(work, 3)
    assert counts == [0 if lacks else 1] * 3
    assert [lacks in each for each in told if "session.save saves nothing" in each] == [True] * bool(lacks)


def test_a_worker_that_came_back_alone_puts_no_server_back(tmp_path: Path) -> None:
    """It is told what the script saved, and keeps the parameters that it began with."""

    def work(worker: Worker) -> None:
        model, _, session = worker.start(network(0), sgd)
        session.save(tmp_path, step=7)
        with torch.no_grad():
            model[0].weight.fill_(3.0)  # type: ignore[index,union-attr,operator]
        session._group.transport = DetachedTransport(0, 1)  # type: ignore[assignment]
        assert session.load(tmp_path) == {"step": 7}
        assert (model[0].weight == 3.0).all()  # type: ignore[index,union-attr]

    cluster(work, 1)


ALONE = """
import sys, torch, gossamer
torch.set_num_threads(1)
world = gossamer.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
session = gossamer.attach(model, optimizer)
if world.is_first:
    session.load("nothing") if sys.argv[1] == "load" else gossamer.average_([torch.ones(3)], "Dense()")
model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("call", "heard"),
    [("load", "call session.load() on every rank"), ("average", "gossamer.average_ was called on this")],
)
def test_processes_end_at_once_where_one_of_them_calls_alone(call: str, heard: str) -> None:
    first, other = run_workers(["-c", ALONE, call], 2)  # which does not wait for half an hour
    assert first.returncode == other.returncode == 1
    assert heard in first.stdout
    assert "Error: " in other.stdout
