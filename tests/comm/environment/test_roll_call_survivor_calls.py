"""gossamer.mean, gather and average_ over the workers that are left, under recipes that outlive losses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pairwise_sessions import PATIENCE_SECONDS, die, still
from support.virtual_workers import Worker, cluster, notices
from torch.distributed import HashStore

import gossamer
from gossamer.comm.environment import roll_call, worker_registry
from gossamer.comm.runtime.worker_scope import WorkerScope, enter
from gossamer.errors import MismatchError
from gossamer.train import world_state
from gossamer.train.synchronizers import peer_endpoints
from gossamer.train.world_state import WorldState


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """The launcher's."""
    store = HashStore()
    monkeypatch.setattr(roll_call, "registry_store", lambda: store)
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(roll_call, "SURE_SECONDS", 0.0)
    return store


def at_place(work: Callable[[Worker], Any]) -> Callable[[Worker], Any]:
    """`work` with a worker scope and a world of its own."""

    def placed(worker: Worker) -> Any:
        enter(WorkerScope())
        world_state.place(
            WorldState(rank=worker.rank, size=worker.world, local_rank=worker.rank, device=torch.device("cpu"))
        )
        return work(worker)

    return placed


def called(rank: int) -> tuple[float, list[int], list[float]]:
    tensors = [torch.full((2,), float(rank)), torch.ones(1, dtype=torch.float64)]
    gossamer.average_(tensors, "TopK(0.5)", state={})
    return gossamer.mean(float(rank)), gossamer.gather(rank), tensors[0].tolist()


@pytest.mark.usefixtures("store")
def test_calls_run_over_the_workers_that_are_left() -> None:
    """The lost one falls silent, and nobody says that it has ended."""
    done = threading.Semaphore(0)

    def work(worker: Worker) -> Any:
        session, *_ = still(worker, [1.0])
        before = called(worker.rank)
        if worker.rank == 2:
            die(session)
            assert all(done.acquire(timeout=PATIENCE_SECONDS) for _ in range(2))
            return before
        after = called(worker.rank)
        done.release()
        session.close()
        return before, after

    with notices() as told:
        *found, lost = cluster(at_place(work), 3)
    assert lost == (1.0, [0, 1, 2], [1.0, 1.0])
    assert found == [((1.0, [0, 1, 2], [1.0, 1.0]), (0.5, [0, 1], [0.5, 0.5]))] * 2
    assert len([each for each in told if "covers ranks 0 and 1, without rank 2" in each]) == 1


@pytest.mark.usefixtures("store")
def test_a_worker_that_closed_its_session_is_not_waited_for() -> None:
    def work(worker: Worker) -> Any:
        session, *_ = still(worker, [1.0])
        found = gossamer.gather(worker.rank) if worker.rank else None
        session.close()
        return found

    assert cluster(at_place(work), 3) == [None, [1, 2], [1, 2]]


def test_calls_before_attach_and_after_close_run_over_the_workers_that_are_left(store: HashStore) -> None:
    def work(worker: Worker) -> Any:
        before = gossamer.gather(worker.rank)
        if worker.rank == 1:
            store.set(f"{worker_registry.EXITED}1", "1")
            return before
        return before, gossamer.mean({"rank": worker.rank, "size": torch.ones(2)})["rank"]

    assert cluster(at_place(work), 3) == [([0, 1, 2], 1.0), [0, 1, 2], ([0, 1, 2], 1.0)]


@pytest.mark.usefixtures("store")
def test_a_number_that_is_not_finite_makes_the_mean_nan() -> None:
    def work(worker: Worker) -> list[float]:
        tensor = torch.tensor([1.0, float("inf") if worker.rank else 2.0])
        gossamer.average_([tensor], "Dense()")
        return tensor.isnan().tolist()

    assert cluster(at_place(work), 2) == [[True, True]] * 2


@pytest.mark.usefixtures("store")
def test_values_that_do_not_fit_together_are_refused_on_every_worker() -> None:
    def work(worker: Worker) -> str:
        with pytest.raises(MismatchError) as failure:
            gossamer.mean({"a": torch.ones(2 + worker.rank)})
        return str(failure.value)

    first, second = cluster(at_place(work), 2)
    assert first == second
    assert "shape (2,) and float32 on rank 0" in first


@pytest.mark.usefixtures("store")
def test_a_recipe_in_lock_step_keeps_to_its_collectives() -> None:
    """A rank that calls alone meets another rank's step, and both are told."""

    def work(worker: Worker) -> Any:
        model = torch.nn.Linear(2, 1)
        session = worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "Dense()")
        assert session._group.roll_call() is None
        return gossamer.gather(worker.rank)

    assert cluster(at_place(work), 2) == [[0, 1]] * 2


def test_without_a_launcher_the_store_of_the_group_is_taken_unless_the_run_encrypts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not encrypted, and other machines may reach it."""
    monkeypatch.setattr(roll_call, "registry_store", lambda: None)
    monkeypatch.setattr(roll_call, "group_store", HashStore)
    monkeypatch.delenv("GOSSAMER_TLS", raising=False)
    calls = roll_call.session_calls(0, 1, tuple)
    assert calls is not None
    assert calls.gather("gossamer.mean", "", b"1") == {0: b"1"}
    monkeypatch.setenv("GOSSAMER_TLS", "folder")
    assert roll_call.session_calls(0, 1, tuple) is None
    assert roll_call.process_calls(0, 1) is None
