"""Sessions of gossip on virtual workers: one pass with a chosen gradient, and what is merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from support.training_loops import LR
from support.virtual_workers import Worker, loss_of, network, parameters
from torch import Tensor

from gossamer.train.session.session import Session


def pass_through(
    session: Session,
    steps: Iterable[int],
    rank: int,
    before: Callable[[Session, int], None] = lambda session, step: None,
) -> None:
    for step in steps:
        session.optimizer.zero_grad()
        loss_of(session.model, step, rank).backward()
        before(session, step)
        session.optimizer.step()


def start(worker: Worker, recipe: str) -> Session:
    model = network(worker.rank)
    return worker.attach(model, torch.optim.SGD(model.parameters(), lr=LR), recipe)


def merged_of(session: Session) -> Tensor:
    with session.averaged_parameters(session.model):
        return parameters(session.model)
