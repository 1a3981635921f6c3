"""A world of one: plain training bit for bit, whatever the recipe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from gossamer import events
from gossamer.errors import Stopped
from gossamer.train.synchronizers.base import SoloSynchronizer

STEPS = 3


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def train(linear: nn.Linear, optimizer: SGD, steps: int = STEPS) -> Tensor:
    for step in range(steps):
        optimizer.zero_grad()
        linear(torch.full((4, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()
    return linear.weight.detach()


def attached(recipe: str) -> tuple[nn.Linear, SGD, gossamer.Session]:
    linear = model()
    optimizer = SGD(linear.parameters(), 0.01, momentum=0.9)
    return linear, optimizer, gossamer.attach(linear, optimizer, recipe)


def plain() -> Tensor:
    linear = model()
    return train(linear, SGD(linear.parameters(), 0.01, momentum=0.9))


@pytest.mark.parametrize("recipe", ["Dense()", "DGC(density=0.5)", "DiLoCo(period=2)", "Gossip() + Ring()"])
def test_training_is_plain_and_its_steps_are_counted(recipe: str) -> None:
    ended: list[events.StepEnded] = []
    end = events.subscribe(lambda event: ended.append(event) if isinstance(event, events.StepEnded) else None)
    linear, optimizer, session = attached(recipe)
    try:
        with session, session.epoch(), session.no_sync():
            assert torch.equal(train(linear, optimizer), plain())
            state = session.state_dict()
    finally:
        end()
    assert [event.step for event in ended] == [1, 2, 3]
    assert (state["step"], state["passes"], state["state"], state["progress"]) == (STEPS, STEPS, {}, {})


def test_a_run_that_is_asked_to_stop_ends_after_its_step() -> None:
    linear, optimizer, session = attached("Dense()")
    with session:
        session.request_stop()
        with pytest.raises(Stopped):
            train(linear, optimizer)
    assert session.steps == 1


def test_a_synchronizer_that_counts_no_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoloSynchronizer, "after_step", lambda self: None)
    with pytest.raises(AssertionError):
        test_training_is_plain_and_its_steps_are_counted("Dense()")
