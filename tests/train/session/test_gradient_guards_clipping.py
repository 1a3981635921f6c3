"""Gradient clipping: clip_norm holds for whichever optimizer steps first, and means what clip_grad_norm_ does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, agree, closure_of, cluster, loss_of, network, parameters
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gossamer.errors import LoopError

NORM = 0.05


def by_shape(model: nn.Module, **options: Any) -> tuple[Optimizer, Optimizer]:
    """One for matrices, which is attached, and one for the rest."""
    several = [[p for p in model.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
    return SGD(several[0], 0.1, **options), SGD(several[1], 0.2, **options)


def norm_of(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


# -- two optimizers ----------------------------------------------------------------------------------------------------


def trained(worker: Worker, recipe: str, *, rest_first: bool, by_hand: bool) -> tuple[Tensor, float]:
    """Parameters, and the largest norm that the optimizer which is not attached ever used."""
    model = network(0)
    matrices, rest = by_shape(model)
    used: list[float] = []
    rest.register_step_pre_hook(lambda *_: used.append(norm_of(model)))
    session = worker.attach(model, matrices, recipe, clip_norm=None if by_hand else NORM)
    for step in range(4):
        loss_of(model, step, worker.rank).backward()
        if by_hand:
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        for optimizer in (rest, matrices) if rest_first else (matrices, rest):
            optimizer.step()
        for optimizer in (matrices, rest):
            optimizer.zero_grad()
    session.close()
    return parameters(model), max(used)


@pytest.mark.parametrize("rest_first", [False, True])
@pytest.mark.parametrize(("recipe", "world"), [("Dense()", 1), ("Dense()", 2), ("TopK(0.3)", 2)])
def test_whoever_steps_first_uses_clipped_gradients(recipe: str, world: int, rest_first: bool) -> None:
    clipped, by_hand = (
        cluster(partial(trained, recipe=recipe, rest_first=rest_first, by_hand=by_hand), world)
        for by_hand in (False, True)
    )
    assert max(norm for _, norm in clipped) <= NORM * (1 + 1e-6)
    assert torch.equal(agree([ended for ended, _ in clipped]), by_hand[0][0]), "clipped twice, or otherwise"


def test_gradients_that_come_between_two_steps_are_clipped_too() -> None:
    """As in a GAN's loop, whose two optimizers make their steps in turn."""

    def work(worker: Worker, by_hand: bool) -> Tensor:
        model = network(0)
        turns = by_shape(model)
        worker.attach(model, turns[0], clip_norm=None if by_hand else NORM)
        for step in range(6):
            loss_of(model, step, worker.rank).backward()
            if by_hand:
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
            turns[step % 2].step()
            model.zero_grad(set_to_none=step % 3 == 0)
        return parameters(model)

    assert torch.equal(agree(cluster(lambda w: work(w, False), 2)), agree(cluster(lambda w: work(w, True), 2)))


def test_what_one_optimizer_has_thrown_away_changes_nothing_for_the_other() -> None:
    def work(worker: Worker, throw: bool) -> Tensor:
        model = network(0)
        matrices, rest = by_shape(model)
        worker.attach(model, matrices, clip_norm=NORM)
        for step in range(3):
            loss_of(model, step, worker.rank).backward()
            matrices.step()
            if throw:
                matrices.zero_grad()
            rest.step()
            model.zero_grad()
        return parameters(model)

    assert torch.equal(agree(cluster(lambda w: work(w, True), 2)), agree(cluster(lambda w: work(w, False), 2)))


def test_parameters_of_another_model_are_left_alone() -> None:
    def work(worker: Worker) -> float:
        model, other = network(0), network(1)
        worker.attach(model, SGD(model.parameters(), 0.1), clip_norm=NORM)
        loss_of(model, 0, worker.rank).backward()
        loss_of(other, 0, worker.rank).backward()
        before = norm_of(model)
        SGD(other.parameters(), 0.1).step()
        assert norm_of(other) > NORM
        return norm_of(model) - before

    assert cluster(work, 2) == [0, 0]


def test_two_optimizers_and_a_loss_scale_are_refused() -> None:
    def work(worker: Worker, optimizers: Callable[[nn.Module], tuple[Optimizer, ...]]) -> None:
        model = network(0, torch.float32)
        several = optimizers(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        worker.attach(model, several[0], scaler=scaler, clip_norm=NORM)
        scaler.scale(loss_of(model, 0, worker.rank)).backward()
        for optimizer in several:
            scaler.step(optimizer)

    cluster(lambda worker: work(worker, lambda model: (SGD(model.parameters(), 0.1),)), 2)
    with pytest.raises(LoopError, match=r"may still be scaled.*scaler\.unscale_\(optimizer\), then torch\.nn"):
        cluster(lambda worker: work(worker, by_shape), 2)


# -- closures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attached", [True, False])
def test_a_closure_is_refused(attached: bool) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        both = by_shape(model)
        worker.attach(model, both[0], clip_norm=NORM)
        loss_of(model, 0, worker.rank).backward()
        stepping = both[0 if attached else 1]
        stepping.step(closure_of(model, stepping, worker.rank))

    with pytest.raises(LoopError, match="clip_grad_norm_"):
        cluster(work, 2)


def test_a_closure_of_what_steps_through_the_attached_one() -> None:
    """As SAM does: it calls the closure, then the step of the one that it wraps."""

    class Wrapper(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            closure()
            self.inner.step()

    def work(worker: Worker) -> float:
        model = network(0)
        optimizer = SGD(model.parameters(), 0.1)
        worker.attach(model, optimizer, clip_norm=NORM)
        Wrapper(optimizer).step(closure_of(model, optimizer, worker.rank))
        return norm_of(model)

    assert max(cluster(work, 2)) <= NORM * (1 + 1e-6)


def test_no_closure_that_is_passed_on_is_none() -> None:
    """As wrappers do: `self.optimizer.step(closure)`."""

    def work(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = SGD(model.parameters(), 0.1)
        worker.attach(model, optimizer, clip_norm=NORM)
        loss_of(model, 0, worker.rank).backward()
        optimizer.step(None)
        return parameters(model)

    agree(cluster(work, 2))


# -- a loss scale that is left to a fused optimizer --------------------------------------------------------------------


def scaled(worker: Worker, rule: Callable[..., Optimizer], fused: bool) -> Tensor:
    model = network(0, torch.float32)
    optimizer = rule(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    worker.attach(model, optimizer, scaler=scaler, clip_norm=NORM)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, worker.rank)).backward()
        scaler.step(optimizer)
        scaler.update()
    return parameters(model)


@pytest.mark.parametrize("rule", [partial(SGD, lr=0.5), partial(AdamW, lr=0.05, eps=0.01)])
def test_fused_optimizers_clip_to_the_same_norm(rule: Callable[..., Optimizer]) -> None:
    fused, unfused = (agree(cluster(partial(scaled, rule=rule, fused=fused), 2)) for fused in (True, False))
    torch.testing.assert_close(fused, unfused, atol=1e-6, rtol=1e-5)
