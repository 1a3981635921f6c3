"""Delayed gradients: averaged in every step, applied a step or more late."""

from __future__ import annotations

import math

import pytest
import torch
from support.training_loops import LR, START, agree, close, gradient, heard, mean_of, run, sgd, spread
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.strategies import EveryStep
from gossamer.errors import LoopError

WORLD = 3


def delayed(delay: int, steps: int, momentum: float) -> list[Tensor]:
    """x' = x - lr g(x of `delay` steps ago); the first steps have no gradient."""
    xs, m, gradients = [START], torch.zeros_like(START), []
    for step in range(steps):
        gradients.append(mean_of([gradient(xs[-1], step, rank) for rank in range(WORLD)]))
        x = xs[-1]
        if step >= delay:
            m = momentum * m + gradients[step - delay]
            x = x - LR * m
        xs.append(x)
    return xs[1:]


def check_late(delay: int, expected: int, momentum: float = 0.0) -> None:
    traces = run(EveryStep(delay=delay), 9, rule=sgd(momentum=momentum))
    for step, x in enumerate(delayed(expected, 9, momentum)):
        close(agree([trace.path[step] for trace in traces]), x)
    assert all(torch.equal(merged, x) for merged, x in zip(traces[0].merged, traces[0].path, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", [1, 3])
def test_late_gradients_are_those_of_earlier_steps(delay: int, momentum: float) -> None:
    check_late(delay, delay, momentum)


@pytest.mark.parametrize("other", [0, 2])
def test_the_check_sees_how_late(other: int) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_late(1, other)


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "Int8()", "PowerSGD(2)"])
def test_late_gradients_are_compressed_alike(recipe: str) -> None:
    """The same script, later: with a learning rate of 0, what arrives is what arrives without delay, bit for bit."""

    def shown(worker: Worker, strategy: str) -> list[Tensor]:
        model, optimizer, _ = worker.start(network(worker.rank), sgd(lr=0.0), f"{strategy} + {recipe}")
        seen = []
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            if all(p.grad is not None for p in model.parameters()):
                seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            optimizer.step()
        return seen

    late = cluster(lambda worker: shown(worker, "EveryStep(delay=2)"), 2)
    for one, other in zip(late, cluster(lambda worker: shown(worker, "EveryStep()"), 2), strict=True):
        assert (len(one), len(other)) == (6, 8)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=False))


def test_unused_parameter_has_no_delayed_gradient() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.never, self.once = (nn.Linear(6, 3).double() for _ in range(3))

        def forward(self, x: Tensor, once: bool) -> Tensor:
            y: Tensor = self.trunk(x) + (self.once(x) if once else 0.0)
            return y

    def work(worker: Worker) -> Tensor:
        with seeded(0):
            model = Branches()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        worker.attach(model, optimizer, "EveryStep(delay=1)")
        before = parameters(model.never)
        for step in range(5):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            mse_loss(model(inputs, once=step == 2 and worker.rank == 1), targets).backward()
            assert model.never.weight.grad is None
            assert (model.once.weight.grad is None) == (step != 3), step
            assert (model.trunk.weight.grad is None) == (step == 0)
            optimizer.step()
        assert torch.equal(parameters(model.never), before)
        return parameters(model)

    agree(cluster(work, 2))


def test_a_rank_without_a_gradient_hook_keeps_up() -> None:
    def work(worker: Worker) -> tuple[Tensor, int]:
        model, optimizer, session = worker.start(network(0), sgd(), "EveryStep(delay=1)")
        for step in range(5):
            optimizer.zero_grad()
            if (step, worker.rank) != (2, 1):
                loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return parameters(model), session.steps

    results = cluster(work, 2)
    agree([ended for ended, _ in results])
    assert [steps for _, steps in results] == [5, 5]


@pytest.mark.parametrize("delay", [1, 2])
def test_a_bad_gradient_skips_the_step_it_is_late_for(delay: int) -> None:
    def work(worker: Worker) -> list[Tensor]:
        model, optimizer, _ = worker.start(
            network(worker.rank), sgd(momentum=0.9), f"EveryStep(delay={delay}) + TopK(0.2)"
        )
        path = []
        for step in range(7):
            optimizer.zero_grad()
            loss = mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1])
            (loss * (math.inf if (step, worker.rank) == (3, 1) else 1.0)).backward()
            optimizer.step()
            path.append(parameters(model))
        return path

    with heard(events.Skipped) as skipped:
        together = [agree(xs) for xs in zip(*cluster(work, 2), strict=True)]
    moved = [not torch.equal(a, b) for a, b in zip([START, *together], together, strict=False)]
    assert moved == [step >= delay and step != 3 + delay for step in range(7)]
    assert torch.isfinite(together[-1]).all()
    assert {event.rank for event in skipped} == {1}


def test_grad_scaler_is_informed_of_a_delayed_overflow() -> None:
    """And of the first step, which has no gradient yet: a GradScaler that finds none refuses to go on."""

    def work(worker: Worker) -> tuple[Tensor, list[float]]:
        model = network(worker.rank, torch.float32)
        optimizer = sgd(momentum=0.9)(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        worker.attach(model, optimizer, "EveryStep(delay=1)", scaler=scaler)
        scales = []
        for step in range(7):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank, dtype=torch.float32)
            loss = mse_loss(model(inputs), targets) * (math.inf if (step, worker.rank) == (3, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters(model), scales

    results = cluster(work, 2)
    assert torch.isfinite(agree([ended for ended, _ in results])).all()
    assert {tuple(scales) for _, scales in results} == {(128.0,) * 4 + (64.0,) * 3}


def test_a_constant_loss_scale_changes_no_bit() -> None:
    def work(worker: Worker, scale: float | None) -> Tensor:
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2 * (scale or 1.0), enabled=scale is not None)
        worker.attach(model, optimizer, EveryStep(delay=1), scaler=scaler if scale else None)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, worker.rank)).backward()
            scaler.step(optimizer)
            scaler.update()  # nothing lands in the first step, which it takes for an overflow
        assert scale in (None, scaler.get_scale())
        return parameters(model)

    scaled, plain = (agree(cluster(lambda worker, s=scale: work(worker, s), 2)) for scale in (256.0, None))  # type: ignore[misc]
    assert torch.equal(scaled, plain)
    assert not torch.equal(plain, START)


def test_a_closure_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = torch.optim.LBFGS(model.parameters())
        worker.attach(model, optimizer, "EveryStep(delay=1)")
        inputs, targets = batch(0, worker.rank)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)

    with pytest.raises(LoopError, match=r"EveryStep\(\) with such an optimizer"):
        cluster(work, 2)


def test_statistics_of_batches_are_averaged_when_they_arrive() -> None:
    def work(worker: Worker) -> list[tuple[Tensor, Tensor]]:
        with seeded(0):
            model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        norm = model[1]
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        worker.attach(model, optimizer, "EveryStep(delay=1)")
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            output = model(inputs)
            forward = norm.running_mean.clone()
            mse_loss(output, targets).backward()
            optimizer.step()
            seen.append((forward, norm.running_mean.clone()))
        return seen

    seen = cluster(work, WORLD)
    for step in range(1, 4):
        arrived = agree([each[step][1] for each in seen])
        close(arrived, mean_of([each[step - 1][0] for each in seen]))
    assert spread([each[0][1] for each in seen]) > 0
