"""State of a checkpoint: generators of GPUs are restored where there are some, and others are left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer.train.checkpoint.state import random_state, set_random_state


@pytest.mark.parametrize("here", [0, 1, 2, 3])
def test_a_run_continues_where_there_are_fewer_gpus(monkeypatch: pytest.MonkeyPatch, here: int) -> None:
    restored: dict[int, Tensor] = {}

    def restore(numbers: Tensor, number: int) -> None:
        assert number < here, "torch raises for a GPU that is not there"
        restored[number] = numbers

    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restore)
    saved = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
    set_random_state({**random_state(), "cuda": saved})
    assert restored == dict(list(enumerate(saved))[:here])
