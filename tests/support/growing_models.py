"""Models that gain parameters while they are trained, and the steps that they are trained by."""

from __future__ import annotations

from support.virtual_workers import batch, joined, seeded
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from gossamer.train.session.session import Session


def widened(model: nn.Module, seed: int) -> list[nn.Parameter]:
    """Give a network one more block, other on each rank, with statistics of its own; returns its parameters."""
    assert isinstance(model, nn.Sequential)
    with seeded(seed):
        block = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    model.append(block)
    return list(block.parameters())


def backward(model: nn.Module, step: int, *ranks: int) -> None:
    inputs, targets = joined(batch(step, rank) for rank in ranks)
    mse_loss(model(inputs), targets).backward()


def steps(model: nn.Module, optimizer: Optimizer, session: Session, numbers: range, rank: int) -> None:
    for step in numbers:
        optimizer.zero_grad()
        for part in range(2 if "accumulate" in str(session.recipe) else 1):
            backward(model, 10 * step + part, rank)
        optimizer.step()
