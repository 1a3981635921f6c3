"""First moment: what is true of Adam by every rule. Runs that go on with others, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adam_training import (
    EPS,
    RULES,
    SPARSE,
    WORLD,
    Adam,
    adam,
    by_hand,
    by_torch,
    close,
    everywhere,
    matrices,
    schedule,
    together,
    unused_rows,
)
from support.nightly import once_each
from support.virtual_workers import Worker, agree, batch, cluster, joined, network, parameters, train_step
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from gossamer.algorithms.compressors import CompressedAdam, MicroAdam
from gossamer.base.layout import Slot
from gossamer.errors import AttachError
from gossamer.train.moments import first_moment
from gossamer.train.moments.first_moment import WINDOW, AgreedVariance, MomentumVariance, WindowedMoments


def kept_by_adam(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([torch.zeros(1), *(t.flatten() for each in optimizer.state.values() for t in each.values())])


@pytest.mark.parametrize("term", RULES)
def test_ranks_have_the_same_bits(term: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model, optimizer, _ = worker.start(network(worker.rank, torch.float32), adam, everywhere(term))
        for step in range(8):
            schedule(optimizer, step)
            train_step(model, optimizer, step, worker.rank)
        return parameters(model), kept_by_adam(optimizer)

    models, kept = zip(*cluster(work, 3), strict=True)
    agree(models)
    agree(kept)


@pytest.mark.parametrize("term", RULES)
def test_another_number_of_workers_continues(term: str, tmp_path: Path) -> None:
    def work(worker: Worker, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer, session = worker.start(network(worker.rank), adam, everywhere(term))
        session.load(tmp_path)
        begun = parameters(model), kept_by_adam(optimizer)
        for step in range(session.steps, steps):
            train_step(model, optimizer, step, worker.rank)
        if steps == 5:
            session.save(tmp_path)
            begun = parameters(model), kept_by_adam(optimizer)
        return *begun, parameters(model)

    before = cluster(lambda worker: work(worker, 5), 3)
    after = cluster(lambda worker: work(worker, 8), 2)
    for begun in after:
        assert torch.equal(begun[0], before[0][0])
        assert torch.equal(begun[1], before[0][1])
    agree([each[2] for each in after])
    assert not torch.equal(after[0][2], after[0][0])


@pytest.mark.parametrize("term", [rule for rule in RULES if SPARSE in rule])
def test_rows_that_nobody_used_stay_bit_for_bit(term: str) -> None:
    before, after, _ = unused_rows(term)
    assert torch.equal(before, after)


@once_each("term, options", RULES, [{"foreach": True}, {"fused": True}])
def test_kernels_of_the_optimizer_make_no_difference(term: str, options: dict[str, Any]) -> None:
    """Biases stay with the optimizer, which steps them by whatever it has."""

    def work(worker: Worker, **options: Any) -> Tensor:
        model, optimizer, _ = worker.start(network(0), lambda m: adam(m, **options), term)
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    plain, special = agree(cluster(work, 2)), agree(cluster(lambda worker: work(worker, **options), 2))
    torch.testing.assert_close(plain, special, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("term", [RULES[0], RULES[1], RULES[4]])
def test_a_parameter_may_have_its_first_gradient_late(term: str) -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = adam(model)
        worker.attach(model, optimizer, everywhere(term))
        for step in range(5):
            optimizer.zero_grad()
            part = model if step >= 3 else model[:2]
            before = parameters(model[4])
            part(torch.ones(4, 6, dtype=torch.float64) * (step + worker.rank + 1)).square().mean().backward()
            optimizer.step()
            assert torch.equal(parameters(model[4]), before) == (step < 3)
        assert float(optimizer.state[model.get_parameter("4.weight")]["step"]) == 2
        return parameters(model)

    agree(cluster(work, 2))


def test_adam_continues_when_the_session_is_closed() -> None:
    """The moments are where torch keeps them; the agreed variance is Adam's own, so nothing is noticed."""

    def work(worker: Worker) -> Tensor:
        model = matrices(0)
        optimizer = adam(model)
        session = worker.attach(model, optimizer, everywhere('CompressedAdam(Dense(), variance="agreed")'))
        for step in range(8):
            if step == 4:
                session.close()
            train_step(model, optimizer, step, 0)
        return parameters(model)

    def alone() -> Tensor:
        model = matrices(0)
        optimizer = adam(model)
        for step in range(8):
            train_step(model, optimizer, step, 0)
        return parameters(model)

    torch.testing.assert_close(agree(cluster(work, 2)), alone(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("term", RULES)
@pytest.mark.parametrize(
    ("options", "wrong"),
    [({"amsgrad": True}, "Leave amsgrad out"), ({"maximize": True}, "Leave maximize out")],
)
def test_settings_that_would_not_be_honored_are_refused(term: str, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(AttachError, match=wrong):
        cluster(lambda worker: worker.start(network(0), lambda m: adam(m, **options), everywhere(term)), 2)


def second_momentum(model: nn.Module) -> Adam:
    optimizer = adam(model)
    optimizer.param_groups[0]["betas"] = (0.5, 0.95)
    return optimizer


@pytest.mark.parametrize("term", RULES)
def test_first_betas_that_differ_are_refused(term: str) -> None:
    if "MicroAdam" in term:  # nothing that travels has a beta in it
        cluster(lambda worker: worker.start(network(0), second_momentum, everywhere(term)), 2)
        return
    with pytest.raises(AttachError, match="different momenta"):
        cluster(lambda worker: worker.start(network(0), second_momentum, everywhere(term)), 2)


# -- Moving variance: with all that there is to know, it is AdamS, and Adam --------------------------------------------

ADAMS = 'CompressedAdam(inner=Dense(), variance="momentum")'
AGREED = 'CompressedAdam(inner=Dense(), variance="agreed")'


def adams(p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]) -> Tensor:
    """Zhang et al. 2025, written plainly: the moment before, and no bias correction."""
    before = memory.get("m", torch.zeros_like(p))
    memory["m"] = betas[0] * before + (1 - betas[0]) * gradient
    return memory["m"] / ((betas[1] * before**2 + (1 - betas[1]) * gradient**2).sqrt() + EPS)


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
def test_sending_all_is_adams(kind: type[Adam], cycle: bool) -> None:
    close(together(ADAMS, kind, cycle=cycle), by_hand(adams, kind, cycle=cycle))


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
def test_sending_all_is_adam_itself(kind: type[Adam], cycle: bool) -> None:
    close(together(AGREED, kind, cycle=cycle), by_torch(kind, cycle=cycle))


def test_a_variance_of_the_new_moment_would_be_found() -> None:
    """The step of the twin: v' of m', which is not known before the gradient."""

    def late(p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]) -> Tensor:
        memory["m"] = betas[0] * memory.get("m", torch.zeros_like(p)) + (1 - betas[0]) * gradient
        return memory["m"] / ((betas[1] * memory["m"] ** 2 + (1 - betas[1]) * gradient**2).sqrt() + EPS)

    with pytest.raises(AssertionError):
        close(together(ADAMS), by_hand(late))


def test_a_missing_bias_correction_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_moment, "corrections", lambda state, group: (1.0, 1.0))
    with pytest.raises(AssertionError):
        close(together(AGREED), by_torch())


def step_of(
    rule: type[MomentumVariance | AgreedVariance], gradients: list[list[float]], weight_decay: float = 0.0
) -> tuple[Tensor, Any]:
    """A parameter of zeros after some steps of lr 1, betas 0.5 and 0.75, eps 0.5; and the optimizer's state of it."""
    p = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    optimizer = Adam([p], lr=1.0, betas=(0.5, 0.75), eps=0.5, weight_decay=weight_decay)
    variance = "momentum" if rule is MomentumVariance else "agreed"
    owner = CompressedAdam(variance=variance).owns_momentum(Slot("p", (1,), 0, (1,)))
    made = rule(optimizer, {"p": p}, owner, warns=False)
    for steps, gradient in enumerate(gradients, 1):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        made.before(steps)
        optimizer.step()
        made.after()
    return p.detach(), optimizer.state[p]


def test_two_steps_of_adams_by_hand() -> None:
    """m: 1, 1; v: 0.75 * 0 + 0.25 * 4 = 1, then 0.75 * 1 + 0.25 * 1 = 1; so steps of 1 / 1.5."""
    moved, state = step_of(MomentumVariance, [[2.0], [1.0]])
    close(moved, torch.tensor([-4 / 3], dtype=torch.float64))
    assert (float(state["exp_avg"]), float(state["exp_avg_sq"]), float(state["step"])) == (1.0, 1.0, 2.0)


def test_a_variance_stays_where_nothing_arrived() -> None:
    """The first entry gets 2 and 0: m 1, 0.5, and v 1, 1; the second has v 1, 0.75 + 0.25 = 1."""
    moved, state = step_of(AgreedVariance, [[2.0, 2.0], [0.0, 2.0]])
    assert state["exp_avg_sq"].tolist() == [1.0, 1.75]
    divisor = (1 / (1 - 0.75**2)) ** 0.5 + 0.5
    first = (1 / 0.5) / ((1 / 0.25) ** 0.5 + 0.5)
    close(moved[0], torch.tensor(-first - 0.5 / 0.75 / divisor, dtype=torch.float64))


def test_a_variance_stays_where_only_weight_decay_moves_a_parameter() -> None:
    moved, state = step_of(AgreedVariance, [[2.0, 2.0], [0.0, 2.0]], weight_decay=0.5)
    assert float(state["exp_avg_sq"][0]) == 1.0
    first = (1 / 0.5) / ((1 / 0.25) ** 0.5 + 0.5)
    assert float(state["exp_avg"][0]) == pytest.approx(0.5 * 1.0 + 0.5 * 0.5 * -first)
    assert float(state["exp_avg_sq"][1]) == pytest.approx(0.75 + 0.25 * (2 - 0.5 * first) ** 2)
    assert moved.abs().min() > 0


# -- Window: Adam of the last few gradients ----------------------------------------------------------------------------


def truncated(length: int) -> Any:
    """Modoranu et al. 2024, written plainly."""

    def direction(
        p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]
    ) -> Tensor:
        kept = memory.setdefault("last", [])
        kept.insert(0, gradient.clone())
        del kept[length:]
        first, second = (sum(b**age * g**power for age, g in enumerate(kept)) for power, b in enumerate(betas, 1))
        m, v = (z * (1 - b) / (1 - b**count) for z, b in zip((first, second), betas, strict=True))
        found: Tensor = m / (v.sqrt() + EPS)
        return found

    return direction


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
@pytest.mark.parametrize("length", [1, 3])
def test_sending_all_is_adam_of_the_last_gradients(length: int, kind: type[Adam], cycle: bool) -> None:
    term = f"MicroAdam(inner=Dense(), window={length})"
    close(together(term, kind, cycle=cycle), by_hand(truncated(length), kind, cycle=cycle))


def test_a_window_as_long_as_the_training_is_adam() -> None:
    close(together("MicroAdam(inner=Dense())"), by_torch())


def test_means_are_clipped_as_they_would_be_without_it() -> None:
    """They have no momentum in them when they arrive."""

    def work(worker: Worker, clip_norm: float | None) -> Tensor:
        model = matrices(worker.rank)
        optimizer = adam(model)
        worker.attach(model, optimizer, everywhere("MicroAdam(inner=Dense())"), clip_norm=clip_norm)
        for step in range(10):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    model = matrices(0)
    optimizer = adam(model)
    for step in range(10):
        optimizer.zero_grad()
        inputs, targets = joined(batch(step, rank) for rank in range(WORLD))
        mse_loss(model(inputs), targets).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    close(agree(cluster(lambda worker: work(worker, 0.1), WORLD)), parameters(model))
    with pytest.raises(AssertionError):
        close(agree(cluster(lambda worker: work(worker, None), WORLD)), parameters(model))


@pytest.mark.parametrize("wrong", [2, 4, 10])
def test_another_length_would_be_found(wrong: int) -> None:
    with pytest.raises(AssertionError):
        close(together("MicroAdam(inner=Dense(), window=3)"), by_hand(truncated(wrong)))


def test_a_window_that_is_read_backwards_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_moment, "reversed", lambda ages: ages, raising=False)
    with pytest.raises(AssertionError):
        close(together("MicroAdam(inner=Dense(), window=3)"), by_hand(truncated(3)))


def test_three_steps_by_hand() -> None:
    """Betas of 0.5 and a window of two: after gradients 4, 2, 2 m is 1 + 0.5 and v is 2 + 1; 4 is forgotten."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Adam([p], lr=1.0, betas=(0.5, 0.5), eps=0.0)
    rule = WindowedMoments(
        optimizer, {"p": p}, MicroAdam(window=2).owns_momentum(Slot("p", (1,), 0, (1,))), warns=False
    )
    for steps, gradient in enumerate([4.0, 2.0, 2.0], 1):
        before = p.detach().clone()
        p.grad = torch.full_like(p, gradient)
        rule.before(steps)
        optimizer.step()
        rule.after()
    state = optimizer.state[p]
    assert (float(state["exp_avg"]), float(state["exp_avg_sq"])) == (1.5, 3.0)
    assert state[WINDOW].shape == (2, 1)
    close(before - p.detach(), torch.tensor([(1.5 / 0.875) / (3 / 0.875) ** 0.5], dtype=torch.float64))
