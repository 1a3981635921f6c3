"""Sessions that train locally, with changes that servers merge: real endpoints on loopback, one thread a worker."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.served_training import begun, check_all_learn_and_end_alike, step
from support.virtual_workers import Worker, cluster, heard, network, parameters

from gossamer import events
from gossamer.errors import AttachError

TEXT = "AsyncDiLoCo(period=3, outer_learning_rate=0.7, outer_momentum=0.5)"


@pytest.mark.parametrize(
    "recipe",
    [
        TEXT,
        "AsyncDiLoCo(period=3, quorum=2, outer_momentum=0.5, pull=Int8()) + OneBit()",
        "AsyncDiLoCo(period=4, quorum=3, outer_momentum=0.5, fragments=2) + TopK(0.3)",
        "AsyncDiLoCo(period=2, grace=1.0, outer_momentum=0.0, shards=1) + PowerSGD(rank=1)",
    ],
)
def test_every_worker_ends_with_the_same_parameters_and_a_lower_loss(recipe: str) -> None:
    check_all_learn_and_end_alike(recipe)


def test_every_local_step_is_merged_and_none_waits_for_a_slow_worker() -> None:
    """The slow one makes its second step when the fast one has made all of its own."""
    fast_is_done = threading.Event()

    def run(worker: Worker) -> int:
        model, optimizer, session = begun(worker, TEXT)
        for number in range(21 if worker.rank == 0 else 4):
            if worker.rank == 1 and number == 1:
                assert fast_is_done.wait(20)
            step(model, optimizer, number, worker.rank)
        if worker.rank == 0:
            fast_is_done.set()
        session.close()
        return session.steps

    with heard(events.ContributionsCounted) as told:
        assert cluster(run, 2) == [21, 4]
    assert all(event.late == 0 for event in told)


def test_a_stop_request_reaches_all_workers() -> None:
    def run(worker: Worker) -> bool:
        model, optimizer, session = begun(worker, TEXT)
        for number in range(200):
            if worker.rank == 0 and number == 4:
                session.request_stop()
            step(model, optimizer, number, worker.rank)
            if session.should_stop:
                break
        session.close()
        return session.steps < 200

    assert all(cluster(run, 2))


def test_a_worker_evaluates_with_the_parameters_of_the_servers() -> None:
    evaluated = threading.Barrier(2, timeout=20)

    def run(worker: Worker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model, optimizer, session = begun(worker, "AsyncDiLoCo(period=50)")
        started = parameters(model)
        step(model, optimizer, 0, worker.rank)
        own = parameters(model)
        with session.averaged_parameters(model):
            merged = parameters(model)
        assert torch.equal(parameters(model), own)
        evaluated.wait()
        session.close()
        return started, own, merged

    for started, own, merged in cluster(run, 2):
        assert torch.equal(merged, started), "no change was sent yet"
        assert not torch.equal(own, started)


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_resumed_run_continues_with_unsent_changes_and_momentum(quorum: int, tmp_path: Path) -> None:
    recipe = f"AsyncDiLoCo(period=3, quorum={quorum}, outer_momentum=0.9) + OneBit()"

    def first(worker: Worker) -> torch.Tensor:
        model, optimizer, session = begun(worker, recipe)
        for number in range(5):
            step(model, optimizer, number, worker.rank)
        session.save(tmp_path)
        saved = parameters(model)
        session.close()
        return saved

    def second(worker: Worker) -> tuple[int, torch.Tensor, float, torch.Tensor]:
        model, optimizer, session = begun(worker, recipe)
        session.load(tmp_path)
        loaded, steps = parameters(model), session.steps
        client = session._synchronizer._client
        unsent = sum(unsent.steps[0] for unsent in client._unsent) / len(client._unsent)
        for number in range(5, 12):
            step(model, optimizer, number, worker.rank)
        session.close()
        return steps, loaded, unsent, parameters(model)

    saved, resumed = cluster(first, 2), cluster(second, 2)
    for before, (steps, loaded, unsent, _) in zip(saved, resumed, strict=True):
        assert steps == 5
        assert torch.equal(loaded, before), "local changes that were not sent are in the checkpoint"
        assert unsent == 2
    assert torch.equal(resumed[0][3], resumed[1][3])


def test_a_quorum_above_the_number_of_workers_is_refused() -> None:
    def run(worker: Worker) -> None:
        with pytest.raises(AttachError, match=r"Write AsyncDiLoCo\(period=3, quorum=2\)"):
            begun(worker, "AsyncDiLoCo(period=3, quorum=3)")

    cluster(run, 2)


def test_a_worker_without_others_trains_plainly() -> None:
    def run(worker: Worker) -> float:
        model, optimizer, session = begun(worker, TEXT)
        for number in range(4):
            last = step(model, optimizer, number, worker.rank)
        session.close()
        return last

    assert cluster(run, 1)[0] > 0


def test_each_worker_clips_its_own_gradients() -> None:
    def run(worker: Worker) -> torch.Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session = worker.attach(model, optimizer, "AsyncDiLoCo(period=50)", clip_norm=1e-3)
        before = parameters(model)
        step(model, optimizer, 0, worker.rank)
        moved = parameters(model) - before
        session.close()
        return moved.norm()

    assert all(norm == pytest.approx(1e-3, rel=1e-3) for norm in cluster(run, 2))


def test_a_gradient_scaler_is_refused() -> None:
    def run(worker: Worker) -> None:
        model = network()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(AttachError, match="bfloat16"):
            worker.attach(model, optimizer, TEXT, scaler=scaler)

    cluster(run, 2)
