"""Laws of every rule by which a compressor applies the optimizer's step: runs that fail, stop, or end unevenly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import momentum_training
from support.adam_training import RULES, adam, everywhere, schedule
from support.nightly import once_each
from support.virtual_workers import Worker, agree, cluster, loss_of, network, parameters, train_step
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import LoopError
from gossamer.train.moments.first_moment import AdamRule
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


class Rule(NamedTuple):
    """A compressor that applies the step of the optimizer that `make` makes."""

    recipe: str
    make: Make

    def __repr__(self) -> str:
        return self.recipe


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return momentum_training.sgd(model, nesterov=True)


def cycle(optimizer: torch.optim.Optimizer, step: int) -> None:
    """As OneCycleLR moves learning rates and momenta."""
    if "betas" in optimizer.defaults:
        schedule(optimizer, step)
    for group in optimizer.param_groups:
        if "nesterov" in group:
            group["lr"], group["momentum"] = 0.1 * (1 + step % 3), 0.9 - 0.1 * (step % 3)


SIGNS = ["DeMo(inner=TopK(0.1), decay=0.9)", "DeMo(inner=Rotated(TopK(0.1), block=8), clip=1.0)"]
ALL = [
    *[Rule(everywhere(term), adam) for term in RULES],
    *[Rule(recipe, sgd) for recipe in momentum_training.REAL],
    *[Rule(recipe, adam) for recipe in SIGNS],
]


@once_each("rule, bad, value", ALL, [0, 5], [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_changes_nothing_anywhere(rule: Rule, bad: int, value: float) -> None:
    check_a_bad_gradient_changes_nothing(rule.make, rule.recipe, bad, value)


@once_each("rule, stop", ALL, [2, 5])
def test_a_resumed_run_has_the_same_bits(rule: Rule, stop: int, tmp_path: Path) -> None:
    whole, found = resumed(rule.make, rule.recipe, stop, tmp_path, cycle)
    assert torch.equal(found, whole)


def test_moments_outside_the_optimizers_state_would_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A twin that begins them anew after loading."""
    honest = AdamRule._move
    known: dict[int, nn.Parameter] = {}  # held, so that no other is at the same place later

    def forgetful(self: AdamRule, parameter: nn.Parameter, group: object) -> None:
        if id(parameter) not in known:
            known[id(parameter)] = parameter
            self.optimizer.state[parameter].clear()
        honest(self, parameter, group)  # type: ignore[arg-type]

    monkeypatch.setattr(AdamRule, "_move", forgetful)
    whole, found = resumed(adam, everywhere(RULES[1]), 5, tmp_path, cycle)
    assert not torch.equal(found, whole)


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_the_loss_scale_does_not_show(rule: Rule) -> None:
    check_the_loss_scale_does_not_show(rule.make, rule.recipe)


@pytest.mark.parametrize("rule", [*ALL, Rule(momentum_training.MIXED, sgd)], ids=repr)
def test_ranks_that_run_out_of_data_agree_in_the_end(rule: Rule) -> None:
    """Their schedulers stand still meanwhile, so their momentum is old."""
    check_ranks_without_data_agree(rule.make, rule.recipe, cycle)


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_a_closure_is_refused(rule: Rule) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), rule.make, rule.recipe.replace("warmup=3", "warmup=1"))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step(lambda: 0.0)

    with pytest.raises(LoopError, match=r"without a closure"):
        cluster(work, 2)


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_groups_and_gradients_are_the_users_own_after_every_step(rule: Rule) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), rule.make, rule.recipe)
        settings = [dict(group) for group in optimizer.param_groups]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            assert [dict(group) for group in optimizer.param_groups] == settings
            now = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))

    cluster(work, 2)
