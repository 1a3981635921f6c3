"""The types of MXNet's KVStore as recipes: the semantics of each, and its bytes in both directions."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.virtual_workers import Worker, cluster

from gossamer import engine

RATE, STEPS, SIDE = 0.5, 3, 32
DENSE = 4 * SIDE * SIDE  # bytes of all parameters
BOTH = "ParameterServer('sync', push=TwoBit(threshold=0.5), pull=TwoBit(threshold=0.25))"


def trained(recipe: str, gradients: tuple[float, float]) -> list[float]:
    """The parameter that both workers agree on after steps with one constant gradient for each worker; it begins at 0.

    All entries are equal, so one number describes them.
    """
    together = threading.Barrier(2)

    def work(worker: Worker) -> float:
        def server(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(tensors, lr=RATE)

        options: dict[str, Any] = {} if recipe.startswith("device") else {"server_optimizer": server}
        session = worker.arrays({"w": np.zeros((SIDE, SIDE), np.float32)}, recipe, **options)
        arrays = session.parameters
        for _ in range(STEPS):
            mean = session.give({"w": np.full((SIDE, SIDE), gradients[worker.rank], np.float32)})
            if mean is not None:  # servers make the step otherwise
                arrays = {"w": arrays["w"] - np.float32(RATE) * mean["w"]}
            arrays = session.took_step(arrays)
        session.averaged_parameters()  # waits until this worker's pushes have been applied
        together.wait(60)
        found = session.averaged_parameters()["w"]
        assert np.all(found == found[0, 0])
        return float(found[0, 0])

    return cluster(work, 2)


@pytest.mark.parametrize("recipe", ["local", "device", "dist_sync", "dist_sync_device"])
def test_synchronous_types_step_with_the_mean_of_all_workers(recipe: str) -> None:
    assert trained(recipe, (1.0, 3.0)) == [-RATE * STEPS * 2.0] * 2


def test_dist_async_steps_with_each_push() -> None:
    assert trained("dist_async", (1.0, 3.0)) == [-RATE * STEPS * 4.0] * 2


@pytest.mark.parametrize("recipe", ["device", "local", "dist_sync", "dist_sync_device"])
def test_two_bits_send_the_threshold_and_keep_the_rest_for_later_pushes(recipe: str) -> None:
    """Of 0.25, 0.25, 0.25 the threshold 0.5 is sent once, in the second step; of 0.75 it is sent in every step."""
    assert trained(f"{recipe} + TwoBit(threshold=0.5)", (0.25, 0.75)) == [-RATE * (0.5 + 3 * 0.5) / 2] * 2


def test_dist_async_with_two_bits_steps_with_each_threshold_that_is_pushed() -> None:
    assert trained("dist_async + TwoBit(threshold=0.5)", (0.25, 0.75)) == [-RATE * (0.5 + 3 * 0.5)] * 2


def test_two_bits_in_both_directions_are_read_by_workers_in_steps_of_the_pulls_threshold() -> None:
    def work(worker: Worker) -> list[float]:
        def server(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(tensors, lr=RATE)

        session = worker.arrays({"w": np.zeros((SIDE, SIDE), np.float32)}, BOTH, server_optimizer=server)
        arrays, seen = session.parameters, []
        for _ in range(STEPS):
            session.give({"w": np.full((SIDE, SIDE), 0.75, np.float32)})
            arrays = session.took_step(arrays)
            seen.append(float(arrays["w"][0, 0]))
        return seen

    assert cluster(work, 2) == [[-0.25, -0.5, -0.75]] * 2  # each step moves by 0.5 * 0.5


@pytest.mark.parametrize(
    ("recipe", "pushed", "pulled"),
    [
        ("local", DENSE, DENSE),
        ("dist_sync", DENSE, DENSE),
        ("dist_sync_device", DENSE, DENSE),
        ("dist_async", DENSE, DENSE),
        ("dist_sync + TwoBit(threshold=0.5)", DENSE / 16, DENSE),
        (BOTH, DENSE / 16, DENSE / 16),
    ],
)
def test_bytes_up_and_down_are_those_of_the_type(recipe: str, pushed: float, pulled: float) -> None:
    """A worker of two pushes half of its parameters to the other, and serves half of them: 1/2 + 1/2 of each."""
    parts = engine.estimate({"w": ((SIDE, SIDE), "float32")}, recipe, workers=2).others
    sent = {op: sum(part.bytes_sent for part in parts if part.op == op) for op in ("Push", "Reply")}
    assert sent == {"Push": pushed / 2, "Reply": pulled / 2}


@pytest.mark.parametrize(("recipe", "factor"), [("device", 1), ("device + TwoBit(threshold=0.5)", 16)])
def test_device_sends_gradients_to_the_other_workers(recipe: str, factor: int) -> None:
    estimate = engine.estimate({"w": ((SIDE, SIDE), "float32")}, recipe, workers=2)
    assert sum(part.bytes_sent for bucket in estimate.buckets for part in bucket) == DENSE / factor
