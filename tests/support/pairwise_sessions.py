"""Sessions of pairwise gossip: parameters that no optimizer moves, and exchanges that are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from support.pairwise_partners import UNIT
from support.virtual_workers import Worker
from torch import Tensor, nn

from gossamer.train.session.session import Session
from gossamer.train.synchronizers.pairwise_gossip import PairwiseGossip

RECIPE = "Gossip('pairwise')"
PATIENCE_SECONDS = 30.0


def exchange(session: Session) -> PairwiseGossip:
    assert isinstance(session._synchronizer, PairwiseGossip)
    return session._synchronizer


def settle(session: Session) -> None:
    """Wait for the exchange that this worker has begun, so that many take place in few steps."""
    for talk in exchange(session)._exchanges.values():
        talk.wait(PATIENCE_SECONDS)


def together(worker: Worker) -> None:
    worker.transport.all_gather_text("")


def still(worker: Worker, values: Sequence[float], **options: Any) -> tuple[Session, nn.Linear, torch.optim.Optimizer]:
    """A worker whose optimizer moves nothing, with parameters of its own."""
    model = nn.Linear(len(values), 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = worker.attach(model, optimizer, RECIPE, **options)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values], dtype=torch.float64))
    exchange(session)._drain()
    together(worker)  # or somebody is still shown where all began
    return session, model, optimizer


def start_of(rank: int) -> Tensor:
    return UNIT * torch.tensor([rank + 1.0, 7.0 * rank - 3.0, float(rank == 1)], dtype=torch.float64)


def die(session: Session) -> None:
    """Fall silent without a goodbye, as a process that is killed does."""
    me = exchange(session)._me

    def end() -> None:
        me._dispatcher._close_at = -inf  # the thread that serves the connections ends, and says nothing more

    me._dispatcher.loop.post(end)
    me._thread.join()
