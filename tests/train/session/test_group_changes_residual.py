"""What a worker of an elastic run has still to send, told without any exchange."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
from support.elastic_groups import ElasticRun
from support.elastic_training import told
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, heard, loss_of, network

from gossamer.events import Event, ResidualTold
from gossamer.train.session import group_changes
from gossamer.train.session.group_changes import ResidualReport


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


def check_every_report_is_right(recipe: str) -> list[ResidualTold]:
    with heard(ResidualTold) as events:
        results = ElasticRun(2)(lambda worker: norms(worker, recipe))
    for event in events:
        mine = [found[event.step - 1] for found, _ in results]
        assert any(event.norm == pytest.approx(norm) for norm in mine), (event, mine)
    return events


@pytest.mark.parametrize("recipe", ["TopK(0.2)", "LocalSGD(2) + TopK(0.1)"])
def test_reports_are_the_norms_of_what_is_kept(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
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
    with heard(ResidualTold) as events:
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
