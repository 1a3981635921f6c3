"""Data wait: seconds between the optimizer's step and the next forward pass, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gossamer.train.session.session_status import DataWait


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
