"""Momentum transfer from the optimizer into the compressor: training stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.momentum_training import ALL, MIXED, Cycle, alone, close, go, one_cycle, sgd, together
from support.virtual_workers import Worker, agree, batch, cluster, grow, loss_of, network, notices, parameters, seeded
from torch import Tensor, nn

from gossamer.algorithms.compressors import DGC, Compressor
from gossamer.base.aggregation import Moments
from gossamer.errors import AttachError, LoopError
from gossamer.train.moments.transfer import SGDMomentumTransfer
from gossamer.train.session.ddp_hook import ddp_hook
from gossamer.train.session.session import Session

# -- what must be equal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", [None, one_cycle])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("recipe", [ALL, MIXED])
def test_sending_all_without_masking_is_momentum_sgd(recipe: str, nesterov: bool, cycle: Cycle | None) -> None:
    close(together(recipe, cycle=cycle, nesterov=nesterov), alone(cycle=cycle, nesterov=nesterov))


def test_weight_decay_everywhere_has_momentum_too() -> None:
    close(together(ALL, weight_decay=0.1, nesterov=True), alone(weight_decay=0.1, nesterov=True))
    close(together(ALL, weight_decay=0.1, foreach=True), alone(weight_decay=0.1))


def matrices(momentum: float, recipe: str) -> Tensor:
    """A model without biases, which would keep their momentum in the optimizer; no decay."""

    def work(worker: Worker) -> Tensor:
        with seeded(0):
            model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        worker.attach(model, optimizer, recipe)
        go(model, optimizer, lambda step: loss_of(model, step, worker.rank).backward(), None)
        return parameters(model)

    return agree(cluster(work, 3))


def test_masking_what_is_sent_makes_plain_sgd_of_sending_all() -> None:
    masked = matrices(0.9, "Route(DGC(density=1.0), smallest=0)")
    close(masked, matrices(0.0, "Dense()"))
    with pytest.raises(AssertionError):
        close(masked, matrices(0.9, "Dense()"))
    close(matrices(0.9, ALL), matrices(0.9, "Dense()"))


def test_momentum_from_before_continues() -> None:
    def half(optimizer: torch.optim.Optimizer, steps: range, backward: Callable[[int], None]) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(step)
            optimizer.step()

    def work(worker: Worker, recipes: list[str]) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        for number, recipe in enumerate(recipes):
            with worker.attach(model, optimizer, recipe) as session:
                session._leave.detach()  # the next session meets over the same transport
                half(
                    optimizer,
                    range(4 * number, 4 * number + 4),
                    lambda step: loss_of(model, step, worker.rank).backward(),
                )
        return parameters(model)

    close(agree(cluster(lambda worker: work(worker, ["Dense()", ALL]), 3)), alone())


def test_a_world_of_one_is_plain_training_with_any_optimizer() -> None:
    assert torch.equal(together("DGC(0.01)", 1), alone(1))

    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, torch.optim.AdamW(model.parameters(), 0.1), "DGC(0.01)", clip_norm=1.0)

    cluster(work, 1)


# -- models that change ------------------------------------------------------------------------------------------------


def test_parameters_that_nobody_used_stand_still() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = sgd(model, weight_decay=0.1)
        worker.attach(model, optimizer, ALL)
        for step in range(4):
            optimizer.zero_grad()
            inputs, _ = batch(step, worker.rank)
            used = model if step % 2 else model[:2]
            before = parameters(model[2:])
            used(inputs).square().mean().backward()
            optimizer.step()
            assert torch.equal(parameters(model[2:]), before) == (step % 2 == 0)
        return parameters(model)

    ended = agree(cluster(work, 2))
    model = network(0)
    assert isinstance(model, nn.Sequential)
    optimizer = sgd(model, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.cat([batch(step, rank)[0] for rank in range(2)])
        (model if step % 2 else model[:2])(inputs).square().mean().backward()
        optimizer.step()
    close(ended, parameters(model))


def test_resizing_keeps_the_momentum_of_the_others() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "Route(DGC(density=0.2), smallest=0)")
        for step in range(4):
            if step == 2:
                grow(model[4])
                optimizer.param_groups[1]["params"] = list(model.parameters())[1:]
                kept = {key: t.clone() for key, t in session.state_dict()["state"]["2.weight"].items()}
                session.reset_compressor_state("4.weight", "4.bias")
                now = session.state_dict()["state"]["2.weight"]
                assert all(torch.equal(now[key], kept[key]) for key in kept)
            optimizer.zero_grad()
            model(batch(step, worker.rank)[0]).square().mean().backward()
            optimizer.step()
        return parameters(model)

    agree(cluster(work, 2))


# -- twins -------------------------------------------------------------------------------------------------------------


def test_momentum_applied_twice_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SGDMomentumTransfer.step

    def twice(self: SGDMomentumTransfer, group: Any, owned: Any) -> Any:
        return [part | {"momentum": group["momentum"]} for part in honest(self, group, owned)]

    monkeypatch.setattr(SGDMomentumTransfer, "step", twice)
    with pytest.raises(AssertionError):
        close(together(ALL), alone())


def test_momentum_read_once_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGDMomentumTransfer, "now", lambda self: Moments(0.9))
    close(together(ALL), alone())
    with pytest.raises(AssertionError):
        close(together(ALL, cycle=one_cycle), alone(cycle=one_cycle))


def test_decay_without_momentum_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SGDMomentumTransfer.step
    monkeypatch.setattr(
        SGDMomentumTransfer, "step", lambda self, group, owned: honest(self, group | {"momentum": 0.0}, owned)
    )
    with pytest.raises(AssertionError):
        close(together(ALL, weight_decay=0.1), alone(weight_decay=0.1))


# -- long runs ---------------------------------------------------------------------------------------------------------


def test_training_learns_with_little() -> None:
    """The loss of the model that all share falls nearly as far with a twentieth of the entries as with all."""

    def work(worker: Worker, compressor: Compressor | str) -> float:
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        worker.attach(model, optimizer, compressor)
        for _ in range(60):
            optimizer.zero_grad()
            loss = loss_of(model, 0, worker.rank)
            loss.backward()
            optimizer.step()
        return float(loss_of(model, 0, 0).detach() + loss_of(model, 0, 1).detach())

    dense, little = (cluster(lambda worker, c=c: work(worker, c), 2)[0] for c in ("Dense()", DGC(density=0.05)))
    begin = float(loss_of(network(0), 0, 0).detach() + loss_of(network(0), 0, 1).detach())
    assert little - dense < 0.3 * (begin - dense)


# -- Momentum transfer as schedulers and users see it, and what is refused ---------------------------------------------

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


def hooks_of_saving(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_state_dict_pre_hooks)


def test_an_optimizer_has_one_hook_of_its_session_and_none_after_it() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for _ in range(2):
            with worker.attach(model, optimizer, "LocalSGD(period=2, second_moment='agreed')") as session:
                session._leave.detach()  # the next session meets over the same transport
                session.switch("LocalSGD(period=3, second_moment='agreed')")
                session.switch("DiLoCo(period=2, second_moment='agreed')")
                assert hooks_of_saving(optimizer) == 1
            assert hooks_of_saving(optimizer) == 0

    cluster(work, 2)
