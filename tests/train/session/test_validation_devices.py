"""Device check: where the model lies beside where its worker computes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from support.virtual_workers import notices
from torch import nn

from gossamer.errors import AttachError
from gossamer.train.session import validation
from gossamer.train.session.validation import check_devices

Told = Callable[..., list[str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is said of a model whose parameters lie on some devices."""

    def check(devices: list[str], own: str, workers: int = 2) -> list[str]:
        held = {name: SimpleNamespace(device=torch.device(name)) for name in devices}
        monkeypatch.setattr(validation, "trainable", lambda model: held)
        with notices() as said:
            check_devices(nn.Module(), torch.device(own), workers)
        return said

    return check


@pytest.mark.parametrize(
    ("devices", "own", "workers"),
    [
        (["cpu"], "cpu", 2),
        (["cuda:1"], "cuda:1", 2),
        (["cuda:0", "cuda:1", "cpu"], "cuda:0", 2),  # layers of one model on several
        (["cuda:0"], "cpu", 2),  # workers that share a GPU
        (["cuda:0"], "cuda:1", 1),
    ],
)
def test_nothing_is_said_of_what_is_as_it_should_be(told: Told, devices: list[str], own: str, workers: int) -> None:
    assert told(devices, own, workers) == []


def test_a_gpu_that_stays_idle_is_told(told: Told) -> None:
    (said,) = told(["cpu"], "cuda:1")
    assert "this worker has cuda:1" in said
    assert "model.to(world.device)" in said


def test_another_workers_gpu_is_refused(told: Told) -> None:
    with pytest.raises(AttachError, match=r"on cuda:0, but this worker's device is cuda:1.*model\.to\(world\.dev"):
        told(["cuda:0"], "cuda:1")
