"""Flat optimizer: what workers' velocities and the optimizer's weight decay make of a shard, beside a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.server_runs import Run, flat, parameters, run
from torch import Tensor
from torch.optim import SGD, Adam

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError, RecipeError

SHAPES = {"weight": (5, 8), "out": (2, 10), "bias": (4,)}
WORLD, STEPS, DENSITY = 3, 7, 0.25
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True},
    {"lr": 0.1, "momentum": 0.0},
)


def drawn(tensors: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for name, tensor in tensors.items()
    }


def sent(owed: Tensor, velocity: Tensor, gradient: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Lin et al. 2018: what one worker sends of one tensor; owed and velocity move on."""
    momentum = options["momentum"]
    velocity.mul_(momentum).add_(gradient)
    owed.add_(gradient + momentum * velocity if options.get("nesterov") else velocity)
    places = owed.view(-1).abs().topk(int(DENSITY * owed.numel())).indices
    found = torch.zeros_like(owed)
    found.view(-1)[places] = owed.view(-1)[places]
    owed.view(-1)[places] = 0
    velocity.view(-1)[places] = 0
    return found


def reference(options: Mapping[str, Any], dense: frozenset[str], world: int = WORLD) -> Tensor:
    """All in plain tensors. dense: names that travel whole, whose momentum is the optimizer's."""
    tensors = parameters(SHAPES)
    optimizers = {name: SGD([tensor], **options) for name, tensor in tensors.items()}
    zeros = [{name: torch.zeros_like(tensor.detach()) for name, tensor in tensors.items()} for _ in range(2 * world)]
    for step in range(STEPS):
        gradients = [drawn(tensors, worker, step) for worker in range(world)]
        for name, tensor in tensors.items():
            if name in dense:
                tensor.grad = torch.stack([each[name] for each in gradients]).mean(0)
                optimizers[name].step()
                continue
            means = [
                sent(zeros[2 * worker][name], zeros[2 * worker + 1][name], gradients[worker][name], options)
                for worker in range(world)
            ]
            tensor.grad = torch.zeros_like(tensor)
            optimizers[name].step()  # weight decay, with a momentum of its own
            with torch.no_grad():
                tensor.sub_(options["lr"] * torch.stack(means).mean(0))
    return flat(tensors)


def trained(text: str, options: Mapping[str, Any], **more: Any) -> tuple[Run, Tensor]:
    job = run(
        text, steps=STEPS, make=lambda: parameters(SHAPES), gradient=drawn,
        optimizer=lambda tensors: SGD(tensors, **options), **({"world": WORLD, "servers": 1} | more),
    )  # fmt: skip
    return job, job.go()[0]


@pytest.mark.parametrize("options", GROUPS, ids=str)
@pytest.mark.parametrize(("smallest", "dense"), [(0, {"bias"}), (30, {"bias", "out"})], ids=["all", "some dense"])
def test_velocities_are_pushed_and_applied(options: Mapping[str, Any], smallest: int, dense: set[str]) -> None:
    text = f"ParameterServer('sync', push=Route(DGC({DENSITY}), smallest={smallest}))"
    _, end = trained(text, options)
    torch.testing.assert_close(end, reference(options, frozenset(dense)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["'async'", "'stale', staleness=2"])
def test_each_velocity_is_applied_as_it_arrives(mode: str) -> None:
    """One worker: its own alone."""
    _, end = trained(f"ParameterServer({mode}, push=Route(DGC({DENSITY}), smallest=0))", GROUPS[1], world=1)
    torch.testing.assert_close(end, reference(GROUPS[1], frozenset({"bias"}), 1), rtol=0, atol=1e-12)


def test_a_momentum_that_a_schedule_moves_is_the_one_of_the_step() -> None:
    """Cycled to 0 for all steps, it is plain SGD on what was sent."""
    job = run(
        f"ParameterServer('sync', push=Route(DGC({DENSITY}), smallest=0))", steps=STEPS, world=1, servers=1,
        make=lambda: parameters(SHAPES), optimizer=lambda tensors: SGD(tensors, 0.1, momentum=0.9),
    )  # fmt: skip

    def gradient(tensors: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
        job.clients[worker]._optimizer.param_groups[0]["momentum"] = 0.0
        return drawn(tensors, worker, step)

    job.gradient = gradient
    torch.testing.assert_close(job.go()[0], reference(GROUPS[-1], frozenset({"bias"}), 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (lambda tensors: Adam(tensors, 0.1), r"torch\.optim\.SGD"),
        (lambda tensors: SGD(tensors, 0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda tensors: SGD(tensors, 0.1, momentum=0.9, maximize=True), "maximize"),
    ],
    ids=["Adam", "dampening", "maximize"],
)
def test_an_optimizer_without_such_a_momentum_is_refused(optimizer: Any, line: str) -> None:
    job = run("ParameterServer(push=DGC(0.01))", make=lambda: parameters({"weight": (64, 64)}), optimizer=optimizer)
    with pytest.raises(AttachError, match=line):
        job.client(0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ParameterServer() + DGC(0.001)", r"ParameterServer\(push=Route\(DGC"),
        ("ParameterServer(pull=DGC(0.001))", "momentum"),
        ("ParameterServer(push=OneBitAdam())", "TopK"),
    ],
)
def test_a_momentum_that_would_be_applied_elsewhere_is_refused(text: str, line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        resolve(text)
