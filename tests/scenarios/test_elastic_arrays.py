"""Sessions of arrays in elastic runs: workers are lost and join, and all continue with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.elastic_groups import ElasticRun, Join, Loss
from support.elastic_training import again, few_recipes
from support.virtual_workers import Worker, cluster, heard, notices

from gossamer import engine, events
from gossamer.errors import AttachError, LoopError, MismatchError
from gossamer.train.session.arrays import ArraySession
from gossamer.train.session.group_changes import WorldChange

STEPS, RATE, MOMENTUM = 6, 0.125, 0.5
SHAPES = {"0.weight": (16, 6), "0.bias": (16,), "1.weight": (3, 16)}
FIRST = 3  # operation after all have told what newcomers must be like


class Loop:
    """Gradient descent with momentum on sums of squares: the moments are the loop's own."""

    def __init__(self, worker: Worker, recipe: str, *, hands_state: bool = True, takes_state: bool = True) -> None:
        generator = np.random.default_rng(worker.rank)
        self.rank, self.passes = worker.rank, 2 if "accumulate=2" in recipe else 1
        self.arrays = {name: generator.normal(size=shape) for name, shape in SHAPES.items()}
        self.moments = {f"momentum.{name}": np.zeros(shape) for name, shape in SHAPES.items()}
        self.seen: list[WorldChange] = []
        self.session = worker.arrays(self.arrays, recipe, state=(lambda: self.moments) if hands_state else None)
        self.session.on_change(self.seen.append)
        self.arrays = self.session.parameters
        if takes_state and hands_state:
            self.moments = self.session.state

    def step(self) -> None:
        for part in range(self.passes):
            generator = np.random.default_rng(1000 * self.session.steps + 10 * part + self.rank)
            gradients = {name: array - generator.normal(size=array.shape) for name, array in self.arrays.items()}
            mean = self.session.give(gradients)
            if mean is not None:
                for name in mean:
                    moment = MOMENTUM * self.moments[f"momentum.{name}"] + mean[name]
                    self.moments = {**self.moments, f"momentum.{name}": moment}
                    self.arrays[name] = self.arrays[name] - RATE * moment
            self.arrays = self.session.took_step(self.arrays)

    def run(self) -> tuple[int, bytes]:
        while self.session.steps < STEPS:
            self.step()
        synchronizer = self.session._synchronizer
        synchronizer.flush()
        synchronizer.end_run()
        return self.session.steps, joined(self.session.averaged_parameters())


def joined(arrays: Any) -> bytes:
    return b"".join(np.asarray(array).tobytes() for array in arrays.values())


def trained(recipe: str, worker: Worker) -> tuple[int, bytes]:
    return Loop(worker, recipe).run()


@cache
def operations(recipe: str, world: int = 3) -> int:
    """The number of operations of a run without losses."""
    run = ElasticRun(world)
    run(partial(trained, recipe))
    return run.members.operations[0, 2]


def check_alike(recipe: str, world: int, *faults: Any, **join: Any) -> list[Any]:
    with again(recipe, world, faults, join):
        results = ElasticRun(world, list(faults), **join)(partial(trained, recipe))
        here = [each for each in results if each is not None]
        assert len({*here}) == 1, "workers end with different steps or bits"
        assert here[0][0] == STEPS
        return here


@few_recipes
def test_survivors_of_a_loss_end_with_equal_bits(recipe: str) -> None:
    last = operations(recipe) - 1
    for op, answered in ((0, False), (FIRST, True), (last // 2, False), (last - 1, True)):
        loss = Loss(victim=1, op=op, answered=answered, deaf=frozenset({0} if answered else ()))
        assert len(check_alike(recipe, 3, loss)) in (2, 3)


@few_recipes
def test_a_newcomer_ends_with_the_bits_of_the_others(recipe: str) -> None:
    last = FIRST + 4 if "elay" in recipe else operations(recipe) - 3  # rounds on their way land before it is let in
    for op in (FIRST, (FIRST + last) // 2):
        assert len(check_alike(recipe, 3, newcomers=1, join=Join(op=op, member=op % 3))) == 4


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "LocalSGD(2) + TopK(0.1)"])
@pytest.mark.parametrize("victim", [1, 3])
def test_a_donor_or_the_newcomer_is_lost_while_it_joins(recipe: str, victim: int) -> None:
    for place in (1, 4):
        loss = Loss(group=5, victim=victim, op=place, answered=True, deaf=frozenset({2}))
        assert len(check_alike(recipe, 3, loss, newcomers=1, join=Join(op=8))) in (2, 3)


def test_a_lost_worker_counts_fully_or_not_at_all() -> None:
    """Integers: sums are exact. Each survivor has the sum of whole steps."""

    def count(worker: Worker) -> tuple[int, float]:
        session = worker.arrays({"w": np.zeros(4)}, "Dense()")
        arrays, total = session.parameters, 0.0
        while session.steps < STEPS:
            mean = session.give({"w": np.full(4, 6.0 * (worker.rank + 1))})
            assert mean is not None
            total += float(mean["w"][0])
            arrays = session.took_step({"w": arrays["w"] - mean["w"]})
        assert arrays["w"].tolist() == [-total] * 4
        return session.steps, total

    for op in (FIRST, FIRST + 2, FIRST + 5):
        first, _, third = ElasticRun(3, Loss(victim=1, op=op))(count)
        assert first == third
        assert first[1] == 12.0 * STEPS  # the mean of all three, and that of ranks 0 and 2


def test_changes_are_reported_to_the_loop_and_to_events() -> None:
    def train(worker: Worker) -> list[tuple[int, ...]]:
        loop = Loop(worker, "Dense()")
        loop.run()
        return [(each.size_before, each.size, len(each.lost), each.joined) for each in loop.seen]

    with heard(events.GroupChanged) as found:
        first, _, third = ElasticRun(3, Loss(victim=1, op=6))(train)
    assert first == third == [(3, 2, 1, 0)]
    assert len(found) == 2


# -- the state of the loop ---------------------------------------------------------------------------------------------


def test_mutant_a_newcomer_that_received_no_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take_up = ArraySession._take_up

    def forgetful(self: ArraySession, alike: Any, own: Any) -> None:
        take_up(self, {**alike, "state": {name: 0 * each for name, each in alike["state"].items()}}, own)

    monkeypatch.setattr(ArraySession, "_take_up", forgetful)
    with pytest.raises(MismatchError, match="differs from the group's after the transfer"):
        check_alike("Dense()", 3, newcomers=1, join=Join(op=8))


def test_a_newcomer_that_does_not_take_over_the_state_is_refused() -> None:
    told: list[str] = []

    def train(worker: Worker) -> Any:
        loop = Loop(worker, "Dense()", takes_state=worker.rank < 2)
        if worker.rank < 2:
            return loop.run()
        with pytest.raises(LoopError) as refused:
            loop.step()
        told.append(str(refused.value))
        loop.session._transport.leave()  # type: ignore[attr-defined]
        return None

    results = ElasticRun(2, newcomers=1, join=Join(op=6))(train)
    assert results[0] == results[1]
    assert "momentum.0.weight" in told[0]
    assert "session.state" in told[0]


def test_a_newcomer_without_state_reports_it() -> None:
    def train(worker: Worker) -> Any:
        return Loop(worker, "LocalSGD(2)", hands_state=False).run()

    with notices() as said:
        ElasticRun(2, newcomers=1, join=Join(op=operations("LocalSGD(2)", 2) - 4))(train)
    assert len([each for each in said if "no state of an optimizer" in each]) == 1


def test_a_newcomer_with_other_state_is_refused() -> None:
    def train(worker: Worker) -> Any:
        moments = {"m": np.zeros(2 + worker.rank // 2)}
        if worker.rank == 2:
            with pytest.raises(MismatchError):
                worker.arrays({"w": np.zeros(2)}, "Dense()", state=lambda: moments)
            return None
        session = worker.arrays({"w": np.zeros(2)}, "Dense()", state=lambda: moments)
        arrays = session.parameters
        while session.steps < STEPS:
            session.give({"w": np.ones(2)})
            arrays = session.took_step(arrays)
        return session.steps

    assert ElasticRun(2, newcomers=1, join=Join(op=6))(train)[:2] == [STEPS] * 2


def test_in_a_fixed_run_the_state_is_the_loops_own() -> None:
    own = {"m": np.ones(2)}

    def train(worker: Worker) -> bool:
        return worker.arrays({"w": np.zeros(2)}, "Dense()", state=lambda: own).state["m"] is own["m"]

    assert cluster(train, 2) == [True, True]


def test_a_newcomer_loads_no_checkpoint() -> None:
    def saved(worker: Worker) -> Any:
        return Loop(worker, "TopK(0.1)").session.state_dict()

    states = cluster(saved, 2)

    def train(worker: Worker) -> Any:
        loop = Loop(worker, "TopK(0.1)")
        steps = loop.session.steps
        loop.arrays = loop.session.load_state_dict(states[worker.rank % 2])
        loop.moments = loop.session.state
        assert loop.session.steps == steps
        return loop.run(), steps > 0

    first, second, newcomer = ElasticRun(2, newcomers=1, join=Join(op=8))(train)
    assert first == second == (newcomer[0], False)
    assert newcomer[1]


# -- data --------------------------------------------------------------------------------------------------------------


def test_samples_of_a_lost_worker_are_dealt_out_to_the_survivors() -> None:
    drawn: list[list[int]] = [[], []]  # in each epoch

    def train(worker: Worker) -> int:
        session = worker.arrays({"w": np.zeros(2)}, "Dense()")
        shard = session._world.shard(range(30))  # type: ignore[attr-defined]
        arrays = session.parameters
        for seen in drawn:
            for index in shard:
                session.give({"w": np.full(2, float(index))})
                arrays = session.took_step(arrays)
                seen.append(index)
            arrays, _ = session.end_epoch()
        return session._world.size  # type: ignore[attr-defined, no-any-return]

    assert ElasticRun(3, Loss(victim=1, op=8))(train) == [2, None, 2]
    assert len({*drawn[0]}) == len(drawn[0]) >= 29  # all but the one of the unfinished step
    assert sorted(drawn[1]) == [*range(30)]


# -- refused -----------------------------------------------------------------------------------------------------------


def test_replicas_are_refused_in_an_elastic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.train.session.arrays.is_elastic", lambda: True)
    with pytest.raises(AttachError, match=r"replicas=.*fixed number"):
        engine.Session({"w": np.zeros(2)}, "Dense()", replicas=[0])


def test_ranks_of_several_frameworks_are_refused_in_an_elastic_run() -> None:
    def train(worker: Worker) -> None:
        worker.arrays({"w": np.zeros(2)}, "Dense()", framework=["JAX 1", "arrays"][worker.rank])

    with pytest.raises(MismatchError, match="several frameworks"):
        ElasticRun(2)(train)


# -- processes ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, zlib
import numpy as np
import gossamer
from gossamer import engine

world = gossamer.init()
place, first_life = int(os.environ["GOSSAMER_PLACE"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
parameters, moments = {"w": np.zeros((8, 4)), "b": np.zeros(4)}, {"w": np.zeros((8, 4)), "b": np.zeros(4)}
changes, settled = [], 0
with engine.Session(parameters, "TopK(0.5)", state=lambda: moments) as session:
    session.on_change(lambda change: changes.append((len(change.lost), change.joined)))
    parameters, moments = session.parameters, session.state
    while settled < 5:
        if place == 1 and first_life and session.steps >= 5:
            os.kill(os.getpid(), signal.SIGKILL)
        draw = np.random.default_rng([world.rank, session.steps])
        mean = session.give({name: each - draw.normal(size=each.shape) for name, each in parameters.items()})
        if mean is not None:
            moments = {name: 0.9 * moments[name] + mean[name] for name in mean}
            parameters = {name: parameters[name] - 0.1 * moments[name] for name in mean}
        parameters = session.took_step(parameters)
        settled += world.size == 3 and session.steps > 8
    digest = zlib.crc32(b"".join(each.tobytes() for each in (*parameters.values(), *moments.values())))
    print("ended", place, session.steps, digest, changes, flush=True)
"""


@pytest.mark.processes
def test_promise_1_a_killed_worker_of_arrays_is_replaced_and_all_end_with_equal_hashes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2:3", "--max-restarts", "1", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    found = re.findall(r"\bended (\d) (\d+ \d+) ", output)
    assert sorted(place for place, _ in found) == ["0", "1", "2"], output
    assert len({rest for _, rest in found}) == 1, output
    assert "[(1, 0), (0, 1)]" in output  # a loss, then a newcomer
