"""Sync rounds on a schedule: sent and applied while training goes on, counted in steps by all ranks alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forwarding import ForwardingTransport
from support.training_loops import START, agree, heard, run, sgd, spread
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.base.ops import CollectiveOp
from gossamer.base.transport import Transport
from gossamer.train.engine.participation import POLL_BYTES
from gossamer.train.session.session import Session


def backward(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model, step, rank).backward()


# -- travelling -------------------------------------------------------------------------------------------------------


class Gate(ForwardingTransport):
    """Once closed, ops are answered when it is opened; after three seconds in vain, at once."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.open.set()
        self.in_vain = False

    def answer(self, op: CollectiveOp) -> Any:
        self.in_vain = self.in_vain or not self.open.wait(3.0)
        return self._inner.answer(op)

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        answer = self.answer(op)
        return lambda: answer


def steps_while_under_way(recipe: str, launch: int, steps: int) -> set[bool]:
    """Whether ranks made so many more steps after pass `launch` without any answer."""

    def work(worker: Worker) -> bool:
        gate = worker.transport
        assert isinstance(gate, Gate)
        model, optimizer, _ = worker.start(network(worker.rank), sgd(), recipe)
        for made in range(1, launch + steps + 1):
            if made == launch:
                gate.open.clear()
            optimizer.zero_grad()
            backward(model, made, worker.rank)
            optimizer.step()
        gate.open.set()
        return not gate.in_vain

    return set(cluster(work, 2, Gate))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "launch", "delay"),
    [
        ("DiLoCo(4, delay=3)", 4, 3),
        ("DiLoCo(4, fragments=2, delay=2, mix=0.5) + TopK(0.2)", 2, 2),
        ("DelayedAveraging(3, period=4)", 4, 3),
    ],
)
def test_training_continues_while_a_turn_travels(recipe: str, launch: int, delay: int) -> None:
    assert steps_while_under_way(recipe, launch, delay - 1) == {True}


def test_check_detects_waiting_recipes() -> None:
    assert steps_while_under_way("LocalSGD(4)", 4, 1) == {False}


# -- counting ---------------------------------------------------------------------------------------------------------

Loop = Callable[[Worker, Session, int], None]


def muted(worker: Worker, session: Session, step: int) -> None:
    """Two backward passes, of which one counts."""
    with session.no_sync():
        backward(session.model, step, worker.rank)
    backward(session.model, step + 100, worker.rank)
    session.optimizer.step()


def nothing_to_do(worker: Worker, session: Session, step: int) -> None:
    """A rank whose batch reached no parameter."""
    if worker.rank or step % 2:
        backward(session.model, step, worker.rank)
    session.optimizer.step()


def closure(worker: Worker, session: Session, step: int) -> None:
    """Several backward passes within one step are one."""

    def again() -> Tensor:
        session.optimizer.zero_grad()
        loss = mse_loss(session.model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1])
        loss.backward()
        return loss

    session.optimizer.step(again)  # type: ignore[arg-type]


def two_models(worker: Worker, session: Session, step: int) -> None:
    """What another model's backward does is no pass of this one."""
    backward(session.model, step, worker.rank)
    backward(network(3), step, worker.rank)
    session.optimizer.step()


@pytest.mark.parametrize("loop", [muted, nothing_to_do, closure, two_models], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("recipe", ["LocalSGD(4) + TopK(0.3)", "DelayedAveraging(0, period=4)"])
def test_one_step_is_one_pass(recipe: str, loop: Loop) -> None:
    def work(worker: Worker) -> list[Tensor]:
        model = network(worker.rank)
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        optimizer = lbfgs if loop is closure else sgd()(model)
        session = worker.attach(model, optimizer, recipe)
        merged = []
        for step in range(8):
            optimizer.zero_grad()
            loop(worker, session, step)
            assert session.steps == step + 1
            with session.averaged_parameters(model):
                merged.append(parameters(model))
        return merged

    merged = [agree(each) for each in zip(*cluster(work, 3), strict=True)]
    moved = [not torch.equal(now, before) for before, now in zip([START, *merged], merged, strict=False)]
    assert moved == [step % 4 == 3 for step in range(8)]


def test_steps_are_counted_where_several_passes_make_one() -> None:
    """A loop that accumulates by itself: the period is in steps of the optimizer."""

    def work(worker: Worker) -> tuple[list[Tensor], int]:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "LocalSGD(2)")
        path = []
        for step in range(12):
            backward(model, step, worker.rank)
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                path.append(parameters(model))
        return path, session.steps

    results = cluster(work, 3)
    assert {steps for _, steps in results} == {4}
    apart = [spread(each) > 0 for each in zip(*(path for path, _ in results), strict=True)]
    assert apart == [True, False, True, False]


# -- accounts ---------------------------------------------------------------------------------------------------------


def test_bytes_and_steps_are_reported() -> None:
    with heard() as said:
        run("LocalSGD(4)", 9)
    (attached,) = {event.control_bytes for event in said if isinstance(event, events.Attached)}
    ended = [event for event in said if isinstance(event, events.StepEnded)]
    assert sorted(event.step for event in ended) == sorted([*range(1, 10)] * 3)
    merge = 2 * 2 / 3 * START.numel() * 8 + 2 * (POLL_BYTES + attached)
    assert {event.step: event.bytes_sent for event in ended} == {
        step: pytest.approx(merge if step in (4, 8) else 0.0) for step in range(1, 10)
    }
    assert not any(event.skipped for event in ended)


def test_late_gradients_are_reported_with_the_step_that_uses_them() -> None:
    with heard(events.StepEnded) as ended:
        run("EveryStep(delay=2)", 5)
    assert {event.step: event.bytes_sent > 0 for event in ended} == {
        1: False,
        2: False,
        3: True,
        4: True,
        5: True,
    }


# -- stopping ---------------------------------------------------------------------------------------------------------


def until_stopped(worker: Worker, session: Session, batches: int, asks: tuple[int, int]) -> int:
    """How many steps were made. asks: (step, rank) that wants the end."""
    made = 0
    with session.epoch():
        for step in range(batches):
            session.optimizer.zero_grad()
            backward(session.model, step, worker.rank)
            if (step, worker.rank) == asks:
                session.request_stop()
            session.optimizer.step()
            made += 1
    assert session.should_stop
    return made


@pytest.mark.parametrize(
    ("recipe", "last"),
    [
        ("LocalSGD(4)", 8),
        ("PostLocalSGD(4, start=2)", 10),
        ("DiLoCo(6, fragments=3, delay=1, mix=0.5)", 9),
        ("DelayedAveraging(2)", 10),
        ("EveryStep(delay=1)", 10),
        ("EveryStep(accumulate=3)", 9),
    ],
)
def test_everyone_stops_after_the_same_step(recipe: str, last: int) -> None:
    """At the next landing of a sync round that left after it was asked for."""

    def work(worker: Worker) -> tuple[int, int, Tensor]:
        model = network(worker.rank)
        session = worker.attach(model, sgd()(model), recipe)
        made = until_stopped(worker, session, 3 if worker.rank == 1 else 40, (7, 2))
        with session.averaged_parameters(model):
            return made, session.steps, parameters(model)

    results = cluster(work, 3)
    assert [made for made, *_ in results] == [last, 3, last]
    assert len({steps for _, steps, _ in results}) == 1
    agree([results[0][2], results[2][2]])


@pytest.mark.parametrize("batches", [(40, 40, 40, 40), (40, 3, 40, 40), (3, 3, 40, 40)], ids=str)
def test_sites_stop_together(batches: tuple[int, ...]) -> None:
    def work(worker: Worker) -> int:
        model = network(worker.rank)
        session = worker.attach(model, sgd()(model), "LocalSGD(4, per_site=2)")
        return until_stopped(worker, session, batches[worker.rank], (5, 3))

    assert cluster(work, 4) == [min(8, most) for most in batches]


def test_a_bad_gradient_within_a_site_skips_the_sites_step() -> None:
    """Of both its workers; the other site goes on, and who it was is told by the rank among all."""

    def work(worker: Worker) -> list[Tensor]:
        model, optimizer, _ = worker.start(network(worker.rank), sgd(), "LocalSGD(4, per_site=2)")
        path = [START]
        for step in range(8):
            optimizer.zero_grad()
            loss = mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1])
            (loss * (float("inf") if (step, worker.rank) == (1, 3) else 1.0)).backward()
            optimizer.step()
            path.append(parameters(model))
        return path

    with heard(events.Skipped) as skipped:
        paths = cluster(work, 4)
    assert [not torch.equal(path[1], path[2]) for path in paths] == [True, True, False, False]
    assert {event.rank for event in skipped} == {3}
    for merge in (4, 8):
        assert torch.isfinite(agree([path[merge] for path in paths])).all()
