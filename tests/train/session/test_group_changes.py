"""A worker is lost at any operation: survivors go on with the same bits, and the step that broke is made once."""

from __future__ import annotations

from functools import partial
from itertools import count
from math import sqrt
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.elastic_training import REPRESENTATIVES, told
from support.nightly import once_each
from support.sessions import RECIPES, sgd
from support.virtual_workers import Worker, cluster, heard, loss_of, network, parameters
from torch import Tensor

from gossamer.comm.elastic.change import Change
from gossamer.errors import CheckpointError
from gossamer.events import Event, ResidualMeasured
from gossamer.train.session import group_changes
from gossamer.train.session.group_changes import ResidualReport, WorldChange
from gossamer.train.world_state import WorldState

STEPS = 4
LOCAL = [
    "LocalSGD(2)",
    "LocalSGD(2) + TopK(0.1)",
    "DiLoCo(2) + Int8()",
    "DiLoCo(4, fragments=2, delay=1)",
    "DelayedAveraging(2)",
    "DelayedAveraging(2) + TopK(0.2)",
    "EveryStep(delay=1)",
    "PostLocalSGD(start=2, period=2)",
]


def trained(recipe: Any, worker: Worker) -> tuple[int, Tensor]:
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
    with session.averaged_parameters(model):
        return session.steps, parameters(model)


def check_survivors_agree(recipe: str, heard: str) -> int:
    """At every second operation. Returns the first at which the run was over."""
    deaf = frozenset({0}) if heard == "by some" else frozenset()
    for op in count(sum(map(ord, recipe + heard)) % 2, 2):
        run = ElasticRun(3, Loss(victim=1, op=op, answered=heard != "by nobody", deaf=deaf))
        first, lost, third = run(partial(trained, recipe))
        if lost is not None:
            return op
        assert first[0] == third[0] == STEPS, op
        assert torch.equal(first[1], third[1]), op
    raise AssertionError


@once_each(
    "recipe, heard",
    [*RECIPES, *LOCAL],
    ["by nobody", "by all", "by some"],
    not_by_day={*RECIPES, *LOCAL}
    - {*REPRESENTATIVES, "Dense()", "DiLoCo(4, fragments=2, delay=1)", "EveryStep(delay=1)"},
)
def test_survivors_agree(recipe: str, heard: str) -> None:
    assert check_survivors_agree(recipe, heard) > 5


def change_of(
    before: tuple[int, ...], now: tuple[int, ...], standings: dict[int, Any], *, replaces: bool = False
) -> Change:
    return Change(number=2, before=before, now=now, standings=standings, seconds=0.0, completed=1, replaces=replaces)


@pytest.mark.parametrize("replaces", [True, False])
def test_change_that_replaces_another_is_reported_once(replaces: bool) -> None:
    """Rank 1 is lost, and then rank 2: before the group has made an exchange without rank 1, or after it."""

    def sizes(worker: Worker) -> list[tuple[int, int]]:
        seen: list[WorldChange] = []
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        session.on_change(seen.append)
        session._extensions.add(session._changes)  # as in an elastic group
        first, second = (0, 1, 2), (0, 1, 2) if replaces else (0, 2)
        for before, now in ((first, (0, 2)), (second, (0,))):
            standings = {0: session._changes.standing()}
            session._changes.moved(change_of(before, now, standings, replaces=replaces and now == (0,)))
        loss_of(model, 0, 0).backward()
        optimizer.step()
        return [(each.size_before, each.size) for each in seen]

    assert cluster(sizes, 1) == [[(3, 1)] if replaces else [(3, 2), (2, 1)]]


def test_renewed_connections_replace_no_change_before_them() -> None:
    """Rank 1 is lost; after an exchange connections break, are made again, and break once more: rank 2 is lost."""

    def sizes(worker: Worker) -> list[tuple[int, int]]:
        seen: list[WorldChange] = []
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        session.on_change(seen.append)
        session._extensions.add(session._changes)  # as in an elastic group
        for before, now, replaces in (((0, 1, 2), (0, 2), False), ((0, 2), (0, 2), False), ((0, 2), (0,), True)):
            session._changes.moved(change_of(before, now, {0: session._changes.standing()}, replaces=replaces))
        loss_of(model, 0, 0).backward()
        optimizer.step()
        return [(each.size_before, each.size) for each in seen]

    assert cluster(sizes, 1) == [[(3, 2), (2, 1)]]


@pytest.mark.parametrize("others", [0, 2])
def test_a_rank_with_another_number_of_shards_fails_alone(others: int) -> None:
    """Rank 1 is lost. Rank 0, 2 or 3 has made other calls of world.shard."""

    def move(worker: Worker) -> None:
        world = WorldState(rank=0, size=4, local_rank=0, device=torch.device("cpu"))
        shard = world.shard(range(12))
        *_, session = worker.start(network(0), sgd, "Dense()", world=world)
        own = session._changes.standing()
        other = {**own, "shards": own["shards"] * others}
        for standings in ({0: other, 2: own, 3: own}, {0: own, 2: other, 3: own}):
            session._changes.moved(change_of((0, 1, 2, 3), (0, 2, 3), standings))
            assert len(shard) == 4
        with pytest.raises(CheckpointError, match=r"same calls of world\.shard"):
            session._changes.moved(change_of((0, 1, 2, 3), (0, 2, 3), {0: own, 2: other, 3: other}))

    cluster(move, 1)


# -- What a worker of an elastic run has still to send, told without any exchange --------------------------------------


def norms(worker: Worker, recipe: str, steps: int = 3) -> tuple[list[float], Any]:
    """After every step, computed from what the buckets hold once the communication thread has nothing left to do."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
        session._group.comm_thread.submit(lambda: None).wait()
        unsent = [tensor for bucket in session._synchronizer.buckets for tensor in bucket.unsent]
        found.append(sqrt(sum(float(each.double().square().sum()) for each in unsent)))
    return found, told(session)


def check_every_report_is_right(recipe: str) -> list[ResidualMeasured]:
    with heard(ResidualMeasured) as events:
        results = ElasticRun(2)(lambda worker: norms(worker, recipe))
    for event in events:
        mine = [found[event.step - 1] for found, _ in results]
        assert any(event.norm == pytest.approx(norm) for norm in mine), (event, mine)
    return events


@pytest.mark.parametrize("recipe", ["TopK(0.2)", "LocalSGD(2) + TopK(0.1)"])
def test_reported_norms_are_those_of_the_residuals(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(group_changes, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(group_changes, "REPORT_SHARE", float("inf"))
    events = check_every_report_is_right(recipe)
    assert sorted(event.step for event in events) == [1, 1, 2, 2, 3, 3]
    assert any(event.norm > 0 for event in events)


def test_the_check_notices_the_norm_of_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_changes, "norm_of", lambda tensors: 1e-3 + sum(float(each.norm()) for each in tensors))
    with pytest.raises(AssertionError):
        check_every_report_is_right("TopK(0.2)")


def test_reports_are_rare_and_none_where_nothing_is_kept_or_workers_are_fixed() -> None:
    assert [event.step for event in check_every_report_is_right("TopK(0.2)")] == [1, 1]
    assert check_every_report_is_right("Dense()") == []
    with heard(ResidualMeasured) as events:
        cluster(lambda worker: norms(worker, "TopK(0.2)"), 2)
    assert events == []


class SlowThread:
    """Measuring takes it a second."""

    def __init__(self, now: list[float]) -> None:
        self._now = now

    def submit(self, job: Any) -> None:
        job()


def test_measuring_takes_a_thousandth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now, measured = [0.0], []

    class Residuals:
        step = 7

        @property
        def buckets(self) -> list[Any]:
            measured.append(now[0])
            now[0] += 1.0
            return []

    report = ResidualReport(SlowThread(now), lambda: now[0])  # type: ignore[arg-type]
    with heard(Event):
        while now[0] < 5000.0:
            report.look(Residuals())  # type: ignore[arg-type]
            now[0] += 0.5
    assert len(measured) == 5
