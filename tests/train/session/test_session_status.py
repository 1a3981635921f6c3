"""What print(session) shows: place, recipe as resolved, bytes, and where things go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network, subscribed, train_step
from torch import nn

import gossamer
from gossamer import TopK
from gossamer.comm.simulated import SimulatedGroup
from gossamer.events import Event, StepEnded
from gossamer.train.session.session_status import DataWait, SessionStats, SessionStatus, StepStats


def shown(recipe: object, world: int, steps: int, directory: Path | None = None) -> list[str]:
    def work(worker: Worker) -> str:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        session.status.record = "loss.json"
        for step in range(steps):
            train_step(model, optimizer, step, worker.rank)
        if directory is not None:
            session.save(directory)
        assert repr(session.recipe) in session._repr_html_()
        return repr(session)

    texts: list[str] = cluster(work, world)
    return texts


PARAMETERS = 6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3


def test_repr_before_the_first_step_shows_bytes_of_dense() -> None:
    first, second = shown(TopK(density=0.1), 2, 0)
    assert first.splitlines() == [
        "Session: rank 0 of 2, step 0",
        "  recipe: EveryStep() + Route(Feedback(TopK(density=0.1))) + Complete()",
        f"  sent: nothing yet; Dense() sends {PARAMETERS * 8 / 1000:.1f} kB a step",
        "  record: loss.json; checkpoint: none yet",
    ]
    assert second.startswith("Session: rank 1 of 2, step 0\n")


def test_repr_compares_sent_bytes_with_dense(tmp_path: Path) -> None:
    sparse = shown(TopK(density=0.1), 2, 3, tmp_path)[0].splitlines()
    assert sparse[0] == "Session: rank 0 of 2, step 3"
    factor = float(sparse[2].split(", ")[1].split(" times less than Dense() (3.5 kB)")[0])
    assert 2 < factor < 10
    assert sparse[3] == f"  record: loss.json; checkpoint: {tmp_path}"


def test_dense_is_as_dense_but_for_its_reports() -> None:
    """Reports that end a step count as sent, and here they are as large as the gradients of a small model."""
    (_, _, sent, _) = shown(None, 2, 2)[0].splitlines()
    assert "less" not in sent


def test_a_world_of_one_sends_nothing() -> None:
    assert shown(None, 1, 2)[0].splitlines()[2] == "  sent: nothing, as a world of one"


# -- session.stats -----------------------------------------------------------------------------------------------------


def trained(recipe: object, world: int, steps: int) -> list[tuple[SessionStats, list[StepEnded]]]:
    """By rank, the stats after some steps and the events of these steps."""

    def work(worker: Worker) -> tuple[SessionStats, list[StepEnded]]:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        ended: list[StepEnded] = []
        here = threading.get_ident()

        def hear(event: Event) -> None:
            if isinstance(event, StepEnded) and threading.get_ident() == here:
                ended.append(event)

        with subscribed(hear):
            for step in range(steps):
                train_step(model, optimizer, step, worker.rank)
        return session.stats, ended

    found: list[tuple[SessionStats, list[StepEnded]]] = cluster(work, world)
    return found


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "LocalSGD(2)", "EveryStep(delay=1)"])
def test_stats_are_the_sums_of_the_steps(recipe: str) -> None:
    for stats, ended in trained(recipe, 3, 4):
        assert len(ended) == stats.run.steps == 4
        for found, events in ((stats.run, ended), (stats.last_step, ended[-1:])):
            assert found.steps == len(events)
            assert found.bytes_sent == found.bytes_received == sum(each.bytes_sent for each in events)
            assert found.seconds == pytest.approx(sum(each.seconds for each in events))
            assert found.wait_seconds == pytest.approx(sum(each.waiting_seconds for each in events))
            busy = sum(each.encode_seconds + each.wire_seconds + each.decode_seconds for each in events)
            assert found.communication_seconds == pytest.approx(busy)
            assert found.compute_seconds + found.wait_seconds == pytest.approx(found.seconds)


def test_the_compression_ratio_compares_with_dense_in_as_many_steps() -> None:
    gradients = PARAMETERS * 8 * 2 * 2 / 3  # bytes of an all-reduce of three workers
    for stats, ended in trained("TopK(0.1)", 3, 4):
        assert stats.last_step.compression_ratio == pytest.approx(gradients / ended[-1].bytes_sent)
        assert stats.run.compression_ratio == pytest.approx(4 * gradients / sum(each.bytes_sent for each in ended))
        assert 1.5 < stats.run.compression_ratio < 10
    (local, _), *_ = trained("LocalSGD(4)", 3, 4)
    (every, _), *_ = trained("Dense()", 3, 4)
    assert every.run.compression_ratio is not None
    assert local.run.compression_ratio is not None
    assert local.run.compression_ratio > 2 * every.run.compression_ratio


def test_bytes_from_servers_are_those_that_were_pulled() -> None:
    status = SessionStatus(gossamer.recipe("Dense()"), SimulatedGroup(2).transports[0], lambda: 1)
    status.step_ended(False, {"bytes_sent": 10.0, "bytes_pulled": 30.0})
    status.step_ended(False, {"bytes_sent": 1.0, "bytes_pulled": 3.0})
    stats = status.stats([])
    assert (stats.run.bytes_sent, stats.run.bytes_received) == (11.0, 33.0)
    assert (stats.last_step.bytes_sent, stats.last_step.bytes_received) == (1.0, 3.0)


def test_stats_before_the_first_step_and_of_one_worker() -> None:
    for world, steps in ((2, 0), (1, 2)):
        for stats, _ in trained("TopK(0.1)", world, steps):
            assert stats.run.steps == steps
            assert stats.run.bytes_sent == stats.run.bytes_received == 0
            assert stats.run.compression_ratio is None


def test_stats_are_readable_text() -> None:
    step = StepStats(
        steps=1,
        bytes_sent=1200,
        bytes_received=1200,
        seconds=0.02,
        compute_seconds=0.015,
        wait_seconds=0.005,
        communication_seconds=0.01,
        compression_ratio=31.87,
    )
    assert str(SessionStats(last_step=step, run=replace(step, steps=0))) == (
        "last step: 1 step in 20 ms (compute 15 ms, wait 5 ms; communication 10 ms); sent 1.2 kB, received 1.2 kB; "
        "compression 31.9x\nrun: no step yet"
    )
    assert eval(repr(step), {"StepStats": StepStats}) == step


# -- Data wait: seconds between the optimizer's step and the next forward pass, and no others --------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched(clock: Clock) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, DataWait]]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wait = DataWait(clock)
    hooks = wait.watch(model, optimizer)
    yield model, optimizer, wait
    for hook in hooks:
        hook.remove()
    assert not model._forward_pre_hooks


def test_only_the_way_to_the_next_forward_pass_counts(
    clock: Clock, watched: tuple[nn.Module, torch.optim.Optimizer, DataWait]
) -> None:
    model, optimizer, wait = watched
    seconds = []
    for _ in range(3):
        clock.now += 0.5  # the batch
        loss = model(torch.ones(1, 2)).sum()
        clock.now += 10.0
        loss = loss + model(torch.ones(1, 2)).sum()  # a second pass: computing
        loss.backward()
        seconds.append(wait.take())
        optimizer.step()
    assert seconds == [0.0, 0.5, 0.5]  # nothing is known of the first


def test_saving_is_no_waiting_for_data(
    clock: Clock, watched: tuple[nn.Module, torch.optim.Optimizer, DataWait]
) -> None:
    model, optimizer, wait = watched
    optimizer.step()
    clock.now += 60.0
    wait.begin()  # a checkpoint was saved
    clock.now += 0.25
    model(torch.ones(1, 2))
    assert wait.take() == 0.25
