"""A model with every kind of state that no gradient trains, and a loop that changes it differently on each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from support.virtual_workers import Worker, batch, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer.train.session.session import Session

State = dict[str, Tensor]


class MovingState(nn.Module):
    """BatchNorm's statistics and counter, spectral norm's vectors, a buffer that forward replaces, one that is not
    persistent, and a momentum encoder, which the loop writes through `.data` as DINO's does."""

    seen: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.momentum = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("hidden", torch.zeros(6), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
            self.hidden.mul_(0.5).add_(x.detach()[0])
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out

    def follow(self) -> None:
        for mine, theirs in zip(self.momentum.parameters(), self.last.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def begin(worker: Worker, recipe: str, **options: Any) -> tuple[MovingState, Session]:
    with seeded(worker.rank):
        model = MovingState().double()
    model.momentum.load_state_dict(model.last.state_dict())
    return model, worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, **options)


def train(session: Session, steps: Iterable[int], rank: int) -> list[State]:
    """All state just before each of the optimizer's steps, after which a round may change it."""
    model, found = session.model, []
    assert isinstance(model, MovingState)
    for step in steps:
        session.optimizer.zero_grad()
        inputs, targets = batch(step, rank)
        mse_loss(model(inputs * (1 + rank) + rank), targets).backward()
        found.append(state_of(model))
        session.optimizer.step()
        model.follow()
    return found


def state_of(model: nn.Module) -> State:
    """A copy of parameters and all buffers."""
    return {name: each.detach().clone() for name, each in [*model.named_parameters(), *model.named_buffers()]}


def merged_state(session: Session) -> State:
    with session.averaged_parameters(session.model):
        return state_of(session.model)


def differing(states: list[State]) -> list[str]:
    """Names of what is not the same bits in all of them."""
    return [name for name, each in states[0].items() if not all(torch.equal(each, other[name]) for other in states)]
