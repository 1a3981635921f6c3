"""Laws of sessions, whatever the recipe and optimizer: bad gradients, stops, loss scales and ranks without data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from support.virtual_workers import Worker, agree, cluster, loss_of, network, parameters, train_step
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.train.session.session import Session

Make = Callable[[nn.Module], Optimizer]
#: Called before each step, as a scheduler would be
Schedule = Callable[[Optimizer, int], object]


def unscheduled(optimizer: Optimizer, step: int) -> None:
    """All stays as it was made."""


def everything(session: Session) -> Tensor:
    """All that a worker remembers, and its parameters."""
    mine = [t for each in session.state_dict()["state"].values() for t in each.values()]
    theirs = [t for each in session.optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
    return torch.cat([t.flatten().double() for t in (*mine, *theirs, *session.model.parameters())]).detach()


def check_a_bad_gradient_changes_nothing(make: Make, recipe: str, bad: int, value: float = float("nan")) -> None:
    """On one of three ranks, in step `bad` of eight."""

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), make, recipe)
        for step in range(8):
            before = everything(session)
            optimizer.zero_grad()
            (loss_of(model, step, worker.rank) * (value if (step, worker.rank) == (bad, 1) else 1.0)).backward()
            optimizer.step()
            now = everything(session)
            assert (len(now) == len(before) and torch.equal(now, before)) == (step == bad)
        assert session.steps == 7
        return parameters(model)

    agree(cluster(work, 3))


def resumed(
    make: Make, recipe: str, stop: int, directory: Path, schedule: Schedule = unscheduled
) -> tuple[Tensor, Tensor]:
    """(parameters of a run of nine steps that goes through, of one that stops and goes on)."""

    def work(worker: Worker, steps: int) -> Tensor:
        model, optimizer, session = worker.start(network(worker.rank), make, recipe)
        session.load(directory)
        for step in range(session.steps, steps):
            schedule(optimizer, step)
            train_step(model, optimizer, step, worker.rank)
        if steps == stop:
            session.save(directory)
        return parameters(model)

    whole = agree(cluster(lambda worker: work(worker, 9), 3))
    assert not torch.equal(agree(cluster(lambda worker: work(worker, stop), 3)), whole)
    return whole, agree(cluster(lambda worker: work(worker, 9), 3))


def check_the_loss_scale_does_not_show(make: Make, recipe: str) -> None:
    """Two workers' bits are those at another scale, also after a step that overflows."""

    def work(worker: Worker, scale: float) -> Tensor:
        model = network(0, torch.float32)
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        worker.attach(model, optimizer, recipe, scaler=scaler)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, step, worker.rank)
            scaler.scale(loss * 1e38 * 1e38 if (step, worker.rank) == (5, 1) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == scale / 2
        return parameters(model)

    one, many = (agree(cluster(lambda worker, s=scale: work(worker, s), 2)) for scale in (2.0, 4096.0))
    assert torch.equal(one, many)


def check_ranks_without_data_agree(make: Make, recipe: str, schedule: Schedule = unscheduled) -> None:
    """Epochs of five, two and one steps. A rank's scheduler stands still once it has no more data."""

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), make, recipe)
        for epoch in range(3):
            with session.epoch():
                for step in range([5, 2, 1][worker.rank]):
                    schedule(optimizer, step)
                    train_step(model, optimizer, 10 * epoch + step, worker.rank)
        return parameters(model)

    agree(cluster(work, 3))
