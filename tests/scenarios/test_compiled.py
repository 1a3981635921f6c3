"""Models compiled after attach: nothing of the session is in their graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import batch, network, parameters
from torch._dynamo.exc import Unsupported

import gossamer
from gossamer.session.first_batch import FirstBatch


def train(step: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.Tensor:
    """Three steps alone."""
    torch._dynamo.reset()
    model = network(0)
    optimizer = sgd(model)
    with gossamer.attach(model, optimizer):
        called = step(model)
        for number in range(3):
            called(batch(number, 0)[0]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)


def looks_while_compiling(self: FirstBatch, model: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    self.hash = hash(args[0].numpy().tobytes())


def test_the_graph_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here, and a hook that reads bytes while it is followed would break the graph."""
    assert torch.equal(train(compiled), train(lambda model: model))
    monkeypatch.setattr(FirstBatch, "see", looks_while_compiling)
    with pytest.raises(Unsupported):
        train(compiled)
