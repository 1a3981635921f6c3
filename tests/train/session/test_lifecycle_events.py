"""Closing comparison: ranks on other machines are compared through the store, and never those of one machine alone."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, heard, loss_of, network
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gossamer.comm.environment import JobEnvironment
from gossamer.events import Closed
from gossamer.train.session import lifecycle_events
from gossamer.train.session.lifecycle_events import compared


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Two machines of one worker each, unless the test says otherwise."""
    place, store = {"local_world": 1, "world": 2}, HashStore()
    monkeypatch.setattr(lifecycle_events, "group_store", lambda: store)
    monkeypatch.setattr(lifecycle_events, "here", lambda: JobEnvironment(**place))
    numbers = count()
    monkeypatch.setattr(lifecycle_events, "_endings", iter(lambda: next(numbers) // 2, -1))  # ranks are threads here
    return place


def told(*tensors: dict[str, str], ended: str = "finished") -> list[Closed]:
    def work(worker: Worker) -> Closed:
        mine = tensors[worker.rank]
        closed = Closed(steps=1, digest=str(mine), tensors=mine, residual_bytes=0, bucket_bytes=0, ended=ended)  # type: ignore[arg-type]
        return compared(closed, worker.transport)

    return cluster(work, len(tensors))


SAME, OTHER = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}


def test_two_machines_know_that_they_agree(machines: dict[str, int]) -> None:
    assert [closed.agrees for closed in told(SAME, SAME)] == [True, True]


def test_two_machines_know_which_tensor_differs(machines: dict[str, int]) -> None:
    for closed in told(SAME, OTHER):
        assert closed.agrees is False
        assert closed.differing == {"name": "b", "hashes": {"0": "2", "1": "3"}, "others": 0}


def test_ranks_of_one_machine_are_left_to_its_launcher(machines: dict[str, int]) -> None:
    machines["local_world"] = 2
    assert [closed.agrees for closed in told(SAME, OTHER)] == [None, None]


def test_a_session_that_did_not_finish_waits_for_none(machines: dict[str, int]) -> None:
    assert [closed.agrees for closed in told(SAME, OTHER, ended="failed")] == [None, None]


def test_sessions_of_some_ranks_are_not_compared(machines: dict[str, int]) -> None:
    machines["world"] = 4
    assert [closed.agrees for closed in told(SAME, OTHER)] == [None, None]


def test_a_closed_session_names_the_frozen_parameters_that_the_script_changed() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        for name in ("statistic", "constant"):
            model.register_parameter(name, nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False))
        model, optimizer, session = worker.start(model, sgd)
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()
        model.statistic.add_(worker.rank + 1.0)  # type: ignore[operator, union-attr]
        session.close()

    with heard(Closed) as closed:
        cluster(work, 2)
    assert [[*each.changed_frozen] for each in closed] == [["statistic"], ["statistic"]]
