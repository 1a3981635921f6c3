"""Vectorized training: the same as one after another, for every recipe, and refused where it would not be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.algorithms.strategies.federated_rules import FedAvg, FederatedStrategy
from gossamer.algorithms.strategies.federated_rules.base import Memory
from gossamer.errors import LoopError
from gossamer.federated import Round, SGDSteps, client
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.messages import Task
from gossamer.federated.model_state import ModelState
from gossamer.federated.population import DeviceProfile
from gossamer.federated.virtual.simulate import Simulation, SimulationSettings, simulate
from gossamer.federated.virtual.training import OneByOne
from gossamer.federated.virtual.vectorized_training import ManyAtOnce, training_of

SIZES = [5, 8, 12, 8, 3, 21]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 5)).double()


def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(inputs), labels)


def dropping(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(torch.dropout(inputs, 0.5, True)), labels)


def steps_with(taken: Callable[..., Tensor], momentum: float) -> Any:
    def train(model: nn.Module, told: Round) -> SGDSteps:
        size = SIZES[(told.client or 0) % len(SIZES)]
        inputs = torch.randn(size, 1, 4, 4, dtype=torch.float64)
        labels = torch.randint(5, (size,))
        batches = told.batches(list(zip(inputs.split(4), labels.split(4), strict=True)))
        return SGDSteps(loss=taken, batches=list(batches), learning_rate=0.1, samples=size, momentum=momentum)

    return client(vectorized=True)(train)


@dataclass(frozen=True, repr=False)
class Corrected(FederatedStrategy):
    """Both corrections at once: towards the anchor by a norm of each tensor, and by the device's memory."""

    @property
    def memory_keys(self) -> tuple[str, ...]:
        return ("own",)

    @property
    def shared_keys(self) -> tuple[str, ...]:
        return ("all",)

    @property
    def changes_gradients(self) -> bool:
        return True

    def correct(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Memory, memory: Memory) -> None:
        gradient.add_(parameters - anchor, alpha=0.5).mul_(1 + anchor.norm()).add_(shared["all"]).sub_(memory["own"])


def trained_by(kind: str, strategy: FederatedStrategy, momentum: float, most: int = 4) -> list[Trained]:
    model = network()
    state = ModelState.of(model)
    function = steps_with(loss, momentum)
    way: Any = OneByOne(model, state, strategy, function)
    if kind == "together":
        way = ManyAtOnce(model, state, strategy, function.__gossamer_sgd_steps__, most)
    random = torch.Generator().manual_seed(1)
    flats = [state.read(model).flat + torch.randn(state.layout.numel, generator=random) / 9 for _ in range(6)]
    memory = {key: torch.randn(state.layout.numel, generator=random) / 9 for key in ("own", "all")}
    ops = [
        Train(
            client=number,
            task=Task(round=0, version=0, seed=number),
            anchor=flat.double(),
            shared={key: memory[key].double() for key in strategy.shared_keys},
            memory={key: memory[key].double() * number for key in strategy.memory_keys},
        )
        for number, flat in enumerate(flats)
    ]
    for op in ops:
        way.fewest_steps(op)
    return list(way.train(ops))


@pytest.mark.parametrize("strategy", [FedAvg(), FedAvg(local_steps=7), Corrected(local_epochs=2)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_together_is_one_after_another(strategy: FederatedStrategy, momentum: float) -> None:
    together, alone = (trained_by(kind, strategy, momentum) for kind in ("together", "alone"))
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(one.flat, other.flat, rtol=0, atol=1e-12)
        assert (one.work.samples, one.work.steps) == (other.work.samples, other.work.steps)
        assert one.work.learning_rate == pytest.approx(other.work.learning_rate)
        assert one.metrics == pytest.approx(other.metrics)
    twin = trained_by("alone", FedAvg() if isinstance(strategy, Corrected) else FedAvg(local_steps=1), momentum)
    assert not torch.allclose(together[5].flat, twin[5].flat, rtol=0, atol=1e-6)


def test_a_device_that_is_in_the_same_call_changes_rounding_at_most() -> None:
    pairs = zip(trained_by("together", FedAvg(), 0.0, most=6), trained_by("together", FedAvg(), 0.0, 1), strict=True)
    assert all(torch.allclose(one.flat, other.flat, rtol=0, atol=1e-12) for one, other in pairs)


@pytest.mark.parametrize(
    "recipe",
    [
        "FedAvg(fraction=0.5) + TopK(0.5)",
        "SCAFFOLD(fraction=0.5)",
        "FedProx(mu=0.5, fraction=0.5)",
        "FedBuff(buffer=2, fraction=0.5)",
    ],
)
def test_a_federation_learns_the_same(recipe: str) -> None:
    def final(train: Any) -> Tensor:
        profiles = [DeviceProfile(seconds_per_step=1 + client, round_trip_seconds=1.0) for client in range(12)]
        simulation = Simulation(train, network, recipe, SimulationSettings(clients=12, rounds=3, profiles=profiles))
        return ModelState.of(network()).read(simulation.run().model).flat

    marked = steps_with(loss, 0.0)

    def plain(model: nn.Module, told: Round) -> Any:
        return marked(model, told)

    assert torch.allclose(final(marked), final(plain), rtol=0, atol=1e-12)


def test_momentum_is_refused_where_the_recipe_needs_plain_sgd() -> None:
    with pytest.raises(LoopError, match=r"client 0 has momentum. Write SGDSteps\(momentum=0.0\)"):
        simulate(steps_with(loss, 0.9), network, "SCAFFOLD()", clients=4, rounds=1)


def test_draws_in_a_loss_are_refused() -> None:
    with pytest.raises(LoopError, match=r"many devices at once .*no dropout"):
        simulate(steps_with(dropping, 0.0), network, "FedAvg()", clients=4, rounds=1)


def test_a_function_that_tells_no_steps_is_refused() -> None:
    with pytest.raises(LoopError, match=r"client 0, .* must return SGDSteps"):
        simulate(client(vectorized=True)(lambda model, told: 1), network, "FedAvg()", clients=1, rounds=1)


def test_running_statistics_are_trained_one_after_another_and_it_reports_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    found = training_of(steps_with(loss, 0.0), model, ModelState.of(model), FedAvg())
    assert "one after another (the model averages 1.running_mean" in found.description
