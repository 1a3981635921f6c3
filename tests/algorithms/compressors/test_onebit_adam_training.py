"""1-bit Adam: what training comes to once the variance is frozen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adam_training import Words
from support.session_laws import (
    check_a_bad_gradient_changes_nothing,
    check_ranks_without_data_agree,
    check_the_loss_scale_does_not_show,
    resumed,
)
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
    seeded,
    train_step,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer.algorithms.compressors.dgc import MOMENTUM
from gossamer.errors import AttachError, LoopError
from gossamer.train.moments.first_moment import AdamRule
from gossamer.train.moments.frozen_variance import FrozenVariance

WARMUP = 4
BETAS = (0.8, 0.95)


def adam(model: nn.Module, kind: type[torch.optim.Adam] = torch.optim.AdamW, **options: Any) -> torch.optim.Adam:
    return kind(model.parameters(), **{"lr": 0.01, "betas": BETAS, "weight_decay": 0.1, **options})


def bare(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model without biases: every tensor is one that the compressor takes."""
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).to(dtype)


def recipe(inner: str = "Dense()", warmup: int = WARMUP) -> str:
    return f"Route(OneBitAdam(warmup={warmup}, inner={inner}), smallest=0)"


def first_beta(optimizer: torch.optim.Optimizer, step: int) -> None:
    """As OneCycleLR moves it."""
    for group in optimizer.param_groups:
        group["betas"] = (0.8 - 0.05 * (step % 3), group["betas"][1])


def together(kind: type[torch.optim.Adam], inner: str = "Dense()", cycle: bool = False, steps: int = 10) -> Tensor:
    def work(worker: Worker) -> Tensor:
        model = bare(worker.rank)
        optimizer = adam(model, kind)
        worker.attach(model, optimizer, recipe(inner))
        for step in range(steps):
            if cycle:
                first_beta(optimizer, step)
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    return agree(cluster(work, 3))


def by_hand(kind: type[torch.optim.Adam], cycle: bool = False, steps: int = 10) -> Tensor:
    """One process on the joined batch: Adam at first, then momentum SGD in the units of a frozen variance."""
    model = bare(0)
    optimizer = adam(model, kind)
    for step in range(steps):
        if cycle:
            first_beta(optimizer, step)
        b1 = optimizer.param_groups[0]["betas"][0]
        optimizer.zero_grad()
        inputs, targets = joined(batch(step, rank) for rank in range(3))
        mse_loss(model(inputs), targets).backward()
        if step < WARMUP:
            optimizer.step()
            continue
        with torch.no_grad():
            for p in model.parameters():
                m, v = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
                assert p.grad is not None
                coupled = kind is torch.optim.Adam
                m.copy_(b1 * m + (1 - b1) * (p.grad + 0.1 * p * coupled))
                p.copy_(p * (1.0 if coupled else 1 - 0.01 * 0.1) - 0.01 * m / (v.sqrt() + 1e-8))
    return parameters(model)


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_sending_all_is_preconditioned_momentum_sgd(kind: type[torch.optim.Adam], cycle: bool) -> None:
    torch.testing.assert_close(together(kind, cycle=cycle), by_hand(kind, cycle), atol=1e-12, rtol=1e-12)


def test_a_variance_that_moves_on_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamRule, "step", lambda self, group, owned: [group | {"params": owned}])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(together(torch.optim.Adam), by_hand(torch.optim.Adam), atol=1e-12, rtol=1e-12)


def test_the_optimizers_own_state_goes_on() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = adam(model)
        session = worker.attach(model, optimizer, "OneBitAdam(2)")  # one matrix of three has 256 entries
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            kept = {p: {key: t.clone() for key, t in state.items()} for p, state in optimizer.state.items()}
            optimizer.step()
            for name, p in model.named_parameters():
                frozen = name == "2.weight" and step >= 2
                now = optimizer.state[p]
                assert int(now["step"]) == step + 1
                if step:
                    assert not torch.equal(now["exp_avg"], kept[p]["exp_avg"])
                    assert torch.equal(now["exp_avg_sq"], kept[p]["exp_avg_sq"]) == frozen
        moment = optimizer.state[model.get_parameter("2.weight")]["exp_avg"]
        told = session.state_dict()["state"]["2.weight"]["0.momentum"]
        assert told.norm() > 0
        assert float((moment - told).norm()) < float(moment.norm())  # but for the warm-up's, which fades
        session.close()
        assert [len(group["params"]) for group in optimizer.param_groups] == [6]

    cluster(work, 2)


def rows_after_training(inner: str = "OneBit(block=8)") -> tuple[Tensor, Tensor]:
    """The rows that nobody looked up, before and after."""

    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model = Words()
        before = model.table.weight.detach()[10:].clone()
        optimizer = adam(model, weight_decay=0.0)
        worker.attach(model, optimizer, recipe(inner))
        for step in range(12):
            optimizer.zero_grad()
            ops = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(10 * step + worker.rank))
            model(ops).square().mean().backward()
            optimizer.step()
        return before, model.table.weight.detach()[10:].clone()

    return cluster(work, 2)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("inner", ["OneBit(block=8)", "OneBit(block=2048)", "OneBit(columns=True)", "Int8()"])
def test_rows_that_nobody_used_stay_bit_for_bit(inner: str) -> None:
    before, after = rows_after_training(inner)
    assert torch.equal(before, after)


def test_rows_would_move_without_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FrozenVariance._move

    def unmasked(self: FrozenVariance, parameter: nn.Parameter, group: Any) -> None:
        state = self.optimizer.state[parameter]
        kept = state["exp_avg_sq"]
        state["exp_avg_sq"] = kept.clamp(min=1e-20)
        honest(self, parameter, group)
        state["exp_avg_sq"] = kept

    monkeypatch.setattr(FrozenVariance, "_move", unmasked)
    before, after = rows_after_training("OneBit(block=2048)")
    assert not torch.equal(before, after)


REAL = [recipe("OneBit()"), "Route(OneBitAdam(warmup=3, inner=Int8(), clip=1.0), rest=Int8(), smallest=0)"]


@pytest.mark.parametrize("text", REAL)
@pytest.mark.parametrize("bad", [1, 5])
def test_a_bad_gradient_on_one_rank_changes_nothing_anywhere(text: str, bad: int) -> None:
    check_a_bad_gradient_changes_nothing(adam, text, bad)


@pytest.mark.parametrize("text", REAL)
@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_resumed_run_has_the_same_bits(text: str, stop: int, tmp_path: Path) -> None:
    whole, found = resumed(adam, text, stop, tmp_path, first_beta)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("text", REAL)
def test_the_loss_scale_does_not_show(text: str) -> None:
    check_the_loss_scale_does_not_show(adam, text)


def test_ranks_that_run_out_of_data_agree_in_the_end() -> None:
    check_ranks_without_data_agree(adam, REAL[0], first_beta)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "wrong"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), {}, r"torch\.optim\.Adam\(model\.parameters\(\)"),
        (lambda m: adam(m, amsgrad=True), {}, "amsgrad=True"),
        (lambda m: adam(m, maximize=True), {}, "maximize=True"),
        (adam, {"clip_norm": 1.0}, r"write clip=1\.0"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], options: dict[str, Any], wrong: str
) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, make(model), recipe(), **options)

    with pytest.raises(AttachError, match=wrong):
        cluster(work, 2)


@pytest.mark.parametrize(("dtype", "served"), [(torch.float16, False), (torch.bfloat16, True), (torch.float32, True)])
def test_numbers_that_cannot_hold_a_variance_are_refused(dtype: torch.dtype, served: bool) -> None:
    """Else training ends with parameters that are not finite on every rank."""

    def work(worker: Worker) -> Tensor:
        model = network(0).to(dtype)
        optimizer = adam(model)
        worker.attach(model, optimizer, recipe("OneBit()", warmup=2))
        for step in range(6):
            optimizer.zero_grad()
            model(batch(step, worker.rank)[0].to(dtype)).float().square().mean().backward()
            optimizer.step()
        return parameters(model).float()

    if served:
        assert torch.isfinite(cluster(work, 2)[0]).all()
        return
    with pytest.raises(AttachError, match=r'"0\.weight" is float16.*Keep parameters in float32'):
        cluster(work, 2)


def test_a_first_gradient_after_the_warm_up_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = adam(model)
        worker.attach(model, optimizer, recipe(warmup=2))
        for step in range(4):
            optimizer.zero_grad()
            part = model if step == 3 else model[:2]
            part(batch(step, worker.rank)[0]).square().mean().backward()
            optimizer.step()

    with pytest.raises(LoopError, match=r'"[24]\.weight" has its first gradient after the warm-up'):
        cluster(work, 2)


@pytest.mark.parametrize(("warmup", "lines"), [(2, 2), (100, 1)])
def test_a_short_warm_up_is_noticed(warmup: int, lines: int) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, adam(model), recipe(warmup=warmup))

    with notices() as said:
        cluster(work, 2)
    assert len(said) == lines
    assert f"after {warmup} steps" in said[0]
    assert "frozen" in said[0]
    assert all("3.2 times as long" in line for line in said[1:])


def test_what_travels_begins_at_zero_and_the_warm_ups_moment_stays_in_adams_state() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, betas=(0.9, 0.99))
        session = worker.attach(model, optimizer, "OneBitAdam(warmup=3, inner=Dense())")
        held = model[2].weight  # type: ignore[index]

        def travels() -> Tensor:
            return session.state_dict()["state"]["2.weight"][f"0.{MOMENTUM}"].clone()

        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        assert not travels().any()
        after_warm_up = optimizer.state[held]["exp_avg"].clone()
        assert after_warm_up.any()
        for step in range(3, 6):
            train_step(model, optimizer, step, worker.rank)
            kept = after_warm_up * 0.9 ** (step - 2)
            torch.testing.assert_close(optimizer.state[held]["exp_avg"], kept + travels())

    cluster(work, 2)
