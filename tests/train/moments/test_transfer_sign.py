"""Moving by signs: what training with DeMo comes to, in real sessions of virtual workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_workers import (
    Worker,
    agree,
    batch,
    cluster,
    joined,
    loss_of,
    network,
    notices,
    parameters,
    train_step,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer.errors import AttachError
from gossamer.train.moments.transfer import SignDescent
from gossamer.train.session.session import Session

ALL = "DeMo(inner=Dense(), decay=0.7)"
REAL = ["DeMo(inner=TopK(0.1), decay=0.9)", "DeMo(inner=Rotated(TopK(0.1), block=8), clip=1.0)"]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two that differ in what they may."""
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 0.02, "weight_decay": 0.0}, {"params": rest}]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), **{"lr": 0.01, "weight_decay": 0.1, **options})


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), **{"lr": 0.01, "weight_decay": 0.1, **options})


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups(model), **{"lr": 0.01, "weight_decay": 0.1, **options})


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 / (1 + step + number)


def together(make: Make, recipe: str = ALL, world: int = 3, schedule: Callable[..., None] = schedule) -> Tensor:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(worker.rank), make, recipe)
        for step in range(6):
            schedule(optimizer, step)
            train_step(model, optimizer, step, worker.rank)
        assert world == 1 or not optimizer.state, "the optimizer remembers something"
        session.close()
        return parameters(model)

    return agree(cluster(work, world))


def by_hand(world: int = 3) -> Tensor:
    """signSGD on the joined batch."""
    model = network(0)
    for step in range(6):
        inputs, targets = joined(batch(step, rank) for rank in range(world))
        gradients = torch.autograd.grad(mse_loss(model(inputs), targets), list(model.parameters()))
        with torch.no_grad():
            for number, (p, g) in enumerate(zip(model.parameters(), gradients, strict=True)):
                lr, decay = 0.02 / (1 + step + (number > 0)), 0.1 * (number > 0)
                p.copy_(p * (1 - lr * decay) - lr * g.sign())
    return parameters(model)


@pytest.mark.parametrize("make", [sgd, adam, adamw])
def test_where_everything_is_sent_it_is_sign_descent(make: Make) -> None:
    torch.testing.assert_close(together(make), by_hand(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: sgd(m, foreach=True),
        lambda m: sgd(m, foreach=False),
        lambda m: sgd(m, fused=True),
        lambda m: adamw(m, fused=True),
        lambda m: adamw(m, capturable=True),
        lambda m: adamw(m, betas=(0.5, 0.7), eps=1e-3),
    ],
    ids=["foreach", "one by one", "fused", "fused AdamW", "capturable", "other betas"],
)
def test_how_the_optimizer_computes_makes_no_difference(make: Make) -> None:
    torch.testing.assert_close(together(make), by_hand(), atol=1e-12, rtol=1e-12)


def test_a_learning_rate_read_once_would_be_found() -> None:
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            together(sgd, schedule=lambda optimizer, step: None), by_hand(), atol=1e-12, rtol=1e-12
        )


def test_other_rules_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain optimizer's, and a decay that signs drown."""
    monkeypatch.setattr(SignDescent, "step", lambda self, group, owned: [group | {"params": owned}])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(together(lambda m: sgd(m)), by_hand(), atol=1e-12, rtol=1e-12)


def coupled(self: SignDescent, group: Any, owned: Any) -> Any:
    for p in owned:
        p.sub_((p.grad + group["weight_decay"] * p).sign() * group["lr"])
    return ()


def test_a_decay_within_the_sign_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SignDescent, "step", coupled)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(together(sgd), by_hand(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("make", [sgd, lambda m: sgd(m, momentum=0.9), adamw])
@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_everything_without_signs_is_the_plain_optimizer_to_the_bit(make: Make, decay: float) -> None:
    def work(worker: Worker, recipe: str) -> Tensor:
        model, optimizer, _ = worker.start(network(worker.rank), make, recipe)
        for step in range(5):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    recipe = f"Route(DeMo(inner=Dense(), decay={decay}, sign=False), smallest=0)"
    ours, plain = (agree(cluster(lambda w, r=each: work(w, r), 3)) for each in (recipe, "Dense()"))
    assert torch.equal(ours, plain)


def test_one_worker_alone_trains_plainly() -> None:
    assert torch.equal(together(adamw, "DeMo()", 1), together(adamw, "Dense()", 1))


@pytest.mark.parametrize("strategy", ["LocalSGD(period=2)", "DiLoCo(period=2)"])
def test_rounds_of_parameters_without_signs(strategy: str) -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, f"{strategy} + DeMo(inner=TopK(0.2), sign=False)")
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
        with session.averaged_parameters(model):
            return parameters(model)

    assert not torch.equal(agree(cluster(work, 2)), parameters(network(0)))


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", REAL)
@pytest.mark.parametrize("now", [2, 5])
def test_another_number_of_workers_begins_with_the_mean_of_what_waits(recipe: str, now: int, tmp_path: Path) -> None:
    def momentum(session: Session) -> Tensor:
        state = session.state_dict()["state"]
        return torch.cat([state[name]["residual"].flatten() for name in sorted(state)])

    def before(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), adamw, recipe)
        for step in range(4):
            train_step(model, optimizer, step, worker.rank)
        session.save(tmp_path)
        return momentum(session)

    def after(worker: Worker) -> Tensor:
        _, _, session = worker.start(network(0), adamw, recipe)
        session.load(tmp_path)
        return momentum(session)

    waited = torch.stack(cluster(before, 3))
    assert float(waited.norm()) > 0
    begun = torch.stack(cluster(after, now))
    torch.testing.assert_close(begun.mean(0), waited.mean(0), atol=1e-12, rtol=1e-12)


def test_parameters_that_nobody_used_stand_still() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, REAL[0])
        assert isinstance(model, nn.Sequential)
        for step in range(4):
            optimizer.zero_grad()
            before = parameters(model[2:])
            (model if step % 2 else model[:2])(batch(step, worker.rank)[0]).square().mean().backward()
            optimizer.step()
            assert torch.equal(parameters(model[2:]), before) == (step % 2 == 0)

    cluster(work, 2)


def test_one_line_says_who_moves_parameters_and_one_that_gradients_were_changed() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), adamw, REAL[0])
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            loss_of(model, step, worker.rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    with notices() as said:
        cluster(work, 2)
    assert sum("6 tensors will move by the learning rate and the sign" in line for line in said) == 1
    assert sum("between loss.backward() and optimizer.step()" in line for line in said) == 1


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "wrong"),
    [
        (lambda m: sgd(m, momentum=0.9), {}, r"momentum=0\.9 .* Leave momentum out"),
        (lambda m: sgd(m, maximize=True), {}, "maximize=True"),
        (lambda m: adamw(m, amsgrad=True), {}, "amsgrad=True"),
        (lambda m: adam(m, maximize=True), {}, "maximize=True"),
        (lambda m: torch.optim.RMSprop(m.parameters()), {}, r"torch\.optim\.SGD or torch\.optim\.Adam, but this"),
        (sgd, {"clip_norm": 1.5}, r"Leave clip_norm out and write clip=1\.5"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(make: Make, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(AttachError, match=wrong):
        cluster(lambda worker: worker.start(network(0), make, "DeMo()", **options), 2)


def test_a_momentum_that_comes_later_is_refused() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, "DeMo()")
        optimizer.param_groups[1]["momentum"] = 0.9
        loss_of(model, 0, worker.rank).backward()

    with pytest.raises(AttachError, match="Leave momentum out"):
        cluster(work, 2)
