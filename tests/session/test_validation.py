"""Validation: which optimizer is attached where it is wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import gossamer
from gossamer.errors import AttachError
from gossamer.session.validation import innermost


class Accelerated(Optimizer):
    """As Accelerate's: a subclass without a base's attributes, which passes everything on."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.scaler: Any = None

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Other:
    """No subclass at all."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Lookahead(Optimizer):
    """Was built as an optimizer, with hooks and a step of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_wrappers_without_hooks_are_seen_through() -> None:
    inner = SGD(nn.Linear(3, 2).parameters(), 0.1)
    assert innermost(inner) is inner
    assert innermost(Accelerated(inner)) is inner
    assert innermost(Other(Accelerated(Other(inner)))) is inner
    outer = Lookahead(inner)
    assert innermost(outer) is outer
    assert innermost(Accelerated(outer)) is outer


@pytest.mark.parametrize("strange", [Other(None), Other(Other(3)), Accelerated("SGD"), object()])
def test_what_wraps_no_optimizer_is_refused(strange: Any) -> None:
    with pytest.raises(AttachError, match=r"is no torch\.optim\.Optimizer.*super\(\)\.__init__\(\), or attach"):
        innermost(strange)


def test_a_wrapped_optimizer_makes_the_sessions_steps() -> None:
    model = nn.Linear(3, 2)
    optimizer = Accelerated(SGD(model.parameters(), 0.1))
    with gossamer.attach(model, optimizer, clip_norm=0.01) as session:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert session.optimizer is optimizer.optimizer
        assert session.steps == 1


def test_the_scaler_in_a_wrapper_is_the_loops() -> None:
    model = nn.Linear(3, 2)
    optimizer = Accelerated(SGD(model.parameters(), 0.1))
    with gossamer.attach(model, optimizer) as session:
        assert session.scaler is None
    optimizer.scaler = torch.amp.GradScaler("cpu")
    with gossamer.attach(model, optimizer) as session:
        assert session.scaler is optimizer.scaler
    other = torch.amp.GradScaler("cpu")
    with gossamer.attach(model, optimizer, scaler=other) as session:
        assert session.scaler is other
