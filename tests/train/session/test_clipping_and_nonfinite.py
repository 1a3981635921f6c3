"""Gradient guards in real loops: scalers, clipping, closures, kept gradients, and errors that name the rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, agree, closure_of, cluster, loss_of, network, parameters
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gossamer.errors import CheckpointError, LoopError, MismatchError
from gossamer.train import checkpoint


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.3)"])
def test_uneven_epochs_with_a_scaler(recipe: str) -> None:
    """The scaler of a rank that ran out early catches up too."""

    def work(worker: Worker) -> tuple[Tensor, float]:
        model = network(0, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        session = worker.attach(model, optimizer, recipe, scaler=scaler)
        for epoch in range(2):
            with session.epoch():
                for step in range([6, 2, 1][worker.rank]):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(model, 10 * epoch + step, worker.rank)).backward()
                    scaler.step(optimizer)
                    scaler.update()
        return parameters(model), scaler.get_scale()

    results = cluster(work, 3)
    agree([ended for ended, _ in results])
    assert len({scale for _, scale in results}) == 1
    assert results[0][1] > 4.0


def test_other_scales_and_other_clipping_are_found() -> None:
    def work(worker: Worker, scale: float, clip: float | None) -> None:
        model = network(0, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        worker.attach(model, optimizer, scaler=scaler, clip_norm=clip)
        scaler.scale(loss_of(model, 0, worker.rank)).backward()

    with pytest.raises(MismatchError, match=r"scale=4\.0.*scale=8\.0"):
        cluster(lambda worker: work(worker, 4.0 * 2**worker.rank, None), 2)
    with pytest.raises(MismatchError, match=r"clip_norm=None.*clip_norm=1\.0"):
        cluster(lambda worker: work(worker, 4.0, 1.0 if worker.rank else None), 2)


@pytest.mark.parametrize("where", ["before step", "while accumulating"])
def test_saving_keeps_gradients(where: str, tmp_path: Path) -> None:
    def work(worker: Worker, save: bool) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.3)")
        for step in range(4):
            optimizer.zero_grad()
            with session.no_sync():
                loss_of(model, 10 + step, worker.rank).backward()
            if save and where == "while accumulating":
                session.save(tmp_path)
            loss_of(model, step, worker.rank).backward()
            if save and where == "before step":
                session.save(tmp_path)
            optimizer.step()
        return parameters(model)

    assert torch.equal(agree(cluster(lambda w: work(w, True), 2)), cluster(lambda w: work(w, False), 2)[0])


def test_a_parameter_added_later_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()

    for world in (1, 2):
        with pytest.raises(LoopError, match=r"of shape \(3,\) that is not in the model.*session\.add_parameters\(\)"):
            cluster(work, world)


def test_clip_norm_with_a_closure_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, clip_norm=0.1)
        optimizer.step(closure_of(model, optimizer, worker.rank))

    with pytest.raises(LoopError, match="clip_grad_norm_"):
        cluster(work, 2)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.9)", "Int8()"])
def test_gradients_with_an_overflowing_sum_are_skipped(recipe: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, int]:
        model = nn.Linear(20, 20, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, recipe)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 20), 3e38 if step == 1 else 1.0)).sum().backward()
            optimizer.step()
        return model.weight.detach().clone(), session.steps

    results = cluster(work, 3)
    assert torch.isfinite(agree([weight for weight, _ in results])).all()
    assert {steps for _, steps in results} == {2}


def test_no_gradient_on_a_rank_right_after_an_epoch() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        with session.epoch():
            loss_of(model, 0, worker.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        if worker.rank == 0:
            loss_of(model, 1, worker.rank).backward()
        optimizer.step()
        return parameters(model)

    agree(cluster(work, 2))


def test_a_closed_session_reports_it(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, sgd(model))
        session._group.comm_thread.close()
        with pytest.raises(LoopError, match=r"attach\(\.\.\.\) again"):
            session.save(tmp_path)

    cluster(work, 2)


def test_a_damaged_part_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def work(worker: Worker, load: bool) -> None:
        model = network(0)
        session = worker.attach(model, sgd(model))
        if not load:
            session.save(tmp_path)
            return
        with pytest.raises(CheckpointError, match=r"rank 1: .*damaged"):
            session.load(tmp_path)

    cluster(lambda worker: work(worker, False), 2)
    (file,) = tmp_path.glob("step-*/rank-1.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    cluster(lambda worker: work(worker, True), 2)
    assert checkpoint.complete_steps(tmp_path, 0) == [0]


def test_residuals_are_no_part_of_a_graph() -> None:
    def work(worker: Worker) -> bool:
        model = network(0)
        session = worker.attach(model, sgd(model), "TopK(0.3)")
        loss_of(model, 0, worker.rank).backward(create_graph=True)
        remembered = session.state_dict()["state"].values()
        return any(tensor.requires_grad for each in remembered for tensor in each.values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about create_graph
        assert cluster(work, 2) == [False, False]


def test_the_model_forgets_the_look_at_its_first_batch() -> None:
    def work(worker: Worker) -> int:
        model = network(0)
        worker.attach(model, sgd(model))
        loss_of(model, 0, worker.rank).backward()
        return len(model._forward_pre_hooks)

    assert cluster(work, 2) == [0, 0]


# -- Gradient clipping: clip_norm holds for whichever optimizer steps first, and means what clip_grad_norm_ does

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


def test_gradients_cleared_by_one_optimizer_do_not_change_the_other() -> None:
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


def test_closure_of_a_wrapper_is_clipped() -> None:
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
