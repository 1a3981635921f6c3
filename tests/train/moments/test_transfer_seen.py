"""Momentum transfer as schedulers and users see it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.momentum_training import ALL, sgd, together
from support.virtual_workers import Worker, closure_of, cluster, loss_of, network, notices
from torch import nn

from gossamer.errors import AttachError, LoopError
from gossamer.train.session.ddp_hook import ddp_hook
from gossamer.train.session.session import Session

# -- what schedulers and users see -------------------------------------------------------------------------------------


def test_groups_are_the_users_own_before_and_after_every_step() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd, "DGC(0.1)")
        groups, settings = list(optimizer.param_groups), [dict(group) for group in optimizer.param_groups]
        inside: list[list[tuple[float, float, int]]] = []
        optimizer.register_step_pre_hook(
            lambda optimizer, *rest: inside.append(
                [(g["momentum"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
            )
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            assert all(now is group for now, group in zip(optimizer.param_groups, groups, strict=True))
            assert [dict(group) for group in optimizer.param_groups] == settings
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradient), "the step left something in .grad"
        assert inside == 3 * [[(0.9, 0.0, 1), (0.9, 0.03, 4), (0.0, 0.0, 1)]]
        session.close()
        assert all(now is group for now, group in zip(optimizer.param_groups, groups, strict=True))

    cluster(work, 2)


def test_a_step_that_failed_leaves_no_trace() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd, ALL)
        groups = list(optimizer.param_groups)

        def fail(*rest: Any) -> None:
            raise ZeroDivisionError

        loss_of(model, 0, worker.rank).backward()
        failing = optimizer.register_step_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        failing.remove()
        session.close()
        assert optimizer.param_groups == groups

    cluster(work, 2)


def said_in(work: Callable[[], Any]) -> list[str]:
    with notices() as said:
        work()
    return said


def test_one_line_says_that_momentum_moved() -> None:
    (line,) = said_in(lambda: together("DGC(0.1)"))
    assert "the momentum of 1 tensors moved from the optimizer" in line
    assert not said_in(lambda: together("TopK(0.1)"))
    assert not said_in(lambda: together("DGC(0.1)", 1))


@pytest.mark.parametrize(
    ("recipe", "clips", "lines"), [("DGC(0.1)", True, 1), ("DGC(0.1)", False, 0), ("TopK(0.1)", True, 0)]
)
def test_clipping_after_backward_is_noticed_once(recipe: str, clips: bool, lines: int) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            session.set_batch_weight(2 + worker.rank)
            loss_of(model, step, worker.rank).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()

    said = said_in(lambda: cluster(work, 2))
    assert sum("between loss.backward() and optimizer.step()" in line for line in said) == lines


# -- refusals ----------------------------------------------------------------------------------------------------------


def attach(worker: Worker, make: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> Session:
    model = network(0)
    return worker.attach(model, make(model), options.pop("recipe", ALL), **options)


def differing(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "momentum": 0.5}, {"params": rest}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "options", "wrong"),
    [
        (lambda m: torch.optim.AdamW(m.parameters()), {}, r"momentum of torch\.optim\.SGD.*AdamW.*Train with torch"),
        (lambda m: sgd(m, dampening=0.1), {}, r"dampening=0\.1 .* Leave dampening out"),
        (lambda m: sgd(m, maximize=True), {}, "maximize=True"),
        (differing, {}, r"different momenta, .*momentum=0\.5.*momentum=0\.9.*Give all groups the same"),
        (sgd, {"clip_norm": 1.5}, r"Leave clip_norm out and write clip=1\.5"),
        (sgd, {"recipe": "OneBitAdam(10)"}, r"momentum of torch\.optim\.Adam,.*a SGD"),
        (sgd, {"recipe": "Route(DGC(), rest=OneBitAdam(10), smallest=0)"}, "two kinds of optimizer"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], options: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(AttachError, match=wrong):
        cluster(lambda worker: attach(worker, make, **options), 2)


def test_what_is_not_owned_may_differ() -> None:
    cluster(lambda worker: attach(worker, differing, recipe="DGC(0.1)").close(), 2)


def test_momenta_that_part_later_are_refused() -> None:
    def work(worker: Worker) -> None:
        session = attach(worker, sgd)
        session.optimizer.param_groups[0]["momentum"] = 0.5
        loss_of(session.model, 0, worker.rank).backward()

    with pytest.raises(AttachError, match="different momenta"):
        cluster(work, 2)


def test_fused_optimizers_with_a_scaler_are_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(0, torch.float32)
        optimizer = sgd(model, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        worker.attach(model, optimizer, ALL, scaler=scaler)
        scaler.scale(loss_of(model, 0, worker.rank)).backward()
        scaler.step(optimizer)

    with pytest.raises(LoopError, match="fused=False"):
        cluster(work, 2)


def test_closures_are_refused() -> None:
    def work(worker: Worker, recipe: str) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, recipe)
        optimizer.step(closure_of(model, optimizer, worker.rank))

    cluster(lambda worker: work(worker, "Dense()"), 2)
    with pytest.raises(LoopError, match="without a closure"):
        cluster(lambda worker: work(worker, "DGC(0.1)"), 2)


@pytest.mark.parametrize("recipe", ["DGC(0.1)", "OneBitAdam(10)"])
def test_ddp_is_refused(recipe: str) -> None:
    with pytest.raises(AttachError, match=r"gossamer\.attach\(model, optimizer"):
        ddp_hook(network(0), recipe)


def test_a_state_dict_saved_after_a_step_that_failed_has_the_users_groups() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, ALL)
        before = optimizer.state_dict()["param_groups"]

        def fail(*rest: Any) -> None:
            raise ZeroDivisionError

        loss_of(model, 0, worker.rank).backward()
        failing = optimizer.register_step_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        failing.remove()
        assert optimizer.state_dict()["param_groups"] == before

    cluster(work, 2)
