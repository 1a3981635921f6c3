"""FedOpt's rules by hand, and torch's optimizers on a server."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules import CohortSummary, FedOpt
from gossamer.errors import RecipeError

COHORT = CohortSummary(contributions=2, clients=4, steps=1.0)
RATE, BETA1, BETA2, TAU = 0.5, 0.75, 0.5, 0.25
FIRST, SECOND = 0.5, -0.25  # mean pseudo-gradients of two rounds

# By hand. m1 = 0.25 * 0.5 = 1/8, m2 = 0.75 / 8 - 0.25 / 4 = 1/32. v0 = 1/16; d1^2 = 1/4, d2^2 = 1/16.
MOMENTA = (1 / 8, 1 / 32)
VARIANCES = {
    "adam": (5 / 32, 7 / 64),  # (1/16 + 1/4) / 2, (5/32 + 1/16) / 2
    "yogi": (3 / 16, 5 / 32),  # 1/16 + 1/8 since v < d^2, 3/16 - 1/32 since v > d^2
    "adagrad": (5 / 16, 3 / 8),  # sums
}


def steps(strategy: FedOpt, *means: float) -> Tensor:
    parameters = torch.tensor([1.0], dtype=torch.float64)
    memory = strategy.server_memory(parameters)
    for mean in means:
        strategy.apply(parameters, memory, [torch.tensor([mean], dtype=torch.float64)], COHORT)
    return parameters


@pytest.mark.parametrize("name", VARIANCES)
def test_two_steps_are_those_by_hand(name: str) -> None:
    strategy = FedOpt(name, learning_rate=RATE, beta1=BETA1, beta2=BETA2, tau=TAU)
    wanted = 1.0
    for count, (m, v) in enumerate(zip(MOMENTA, VARIANCES[name], strict=True), 1):
        wanted -= RATE * m / (sqrt(v) + TAU)
        assert steps(strategy, *(FIRST, SECOND)[:count]).item() == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("name", VARIANCES)
def test_the_rules_are_distinguished(name: str) -> None:
    others = [FedOpt(each, learning_rate=RATE, beta1=BETA1, beta2=BETA2, tau=TAU) for each in VARIANCES]
    found = [steps(each, FIRST, SECOND).item() for each in others]
    assert len({round(each, 6) for each in found}) == 3
    corrected = FedOpt("torch.Adam", learning_rate=RATE, beta1=BETA1, beta2=BETA2, tau=TAU)
    assert abs(steps(corrected, FIRST, SECOND).item() - found[0]) > 0.1  # for its beginning


OPTIMIZERS = {
    "SGD": {"momentum": BETA1},
    "Adam": {"betas": (BETA1, BETA2), "eps": TAU},
    "NAdam": {"betas": (BETA1, BETA2), "eps": TAU},
    "Adagrad": {"eps": TAU},
    "RMSprop": {"momentum": BETA1, "eps": TAU},
    "Rprop": {},
    "ASGD": {},
    "Adamax": {"betas": (BETA1, BETA2), "eps": TAU},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers_step_as_in_a_loop_of_ones_own(name: str) -> None:
    means = (FIRST, SECOND, 0.125, 0.0, -1.0)
    own = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = getattr(torch.optim, name)([own], lr=RATE, **OPTIMIZERS[name])
    for mean in means:
        own.grad = torch.tensor([mean], dtype=torch.float64)
        optimizer.step()
    strategy = FedOpt(f"torch.{name}", learning_rate=RATE, beta1=BETA1, beta2=BETA2, tau=TAU)
    assert torch.equal(steps(strategy, *means), own.detach())
    assert not torch.equal(steps(strategy, *means[:-1]), own.detach())


@pytest.mark.parametrize("name", ["adam", "torch.Adam", "torch.SGD"])
def test_all_that_a_server_continues_from_is_in_its_memory(name: str) -> None:
    """Two copies of the memory go on alike; without it the same step is another."""
    strategy = FedOpt(name, learning_rate=RATE)
    parameters = torch.ones(3)
    memory = strategy.server_memory(parameters)
    strategy.apply(parameters, memory, [torch.tensor([1.0, 2.0, 3.0])], COHORT)
    ends = []
    for kept in (memory, strategy.server_memory(parameters)):
        resumed, copy = parameters.clone(), {key: each.clone() for key, each in kept.items()}
        strategy.apply(resumed, copy, [torch.tensor([-1.0, 0.5, 0.0])], COHORT)
        ends.append(resumed)
    strategy.apply(parameters, memory, [torch.tensor([-1.0, 0.5, 0.0])], COHORT)
    assert torch.equal(ends[0], parameters)
    assert not torch.equal(ends[1], parameters)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Adam", r'There is no server optimizer .Adam..* Write FedOpt\("adam"\), or FedOpt\("torch.Adam"\)'),
        ("torch.adagrad", r'or FedOpt\("torch.Adagrad"\)'),
        ("torch.Optimizer", r'or FedOpt\("torch.SGD"\)'),
        ("torch.os", "There is no server optimizer"),
        ("torch.LBFGS", "cannot step on flat parameters.*closure"),
        ("torch.SparseAdam", "cannot step on flat parameters"),
        ("torch.Muon", "cannot step on flat parameters"),
    ],
)
def test_an_invalid_servers_optimizer_is_refused(name: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        FedOpt(name)


@pytest.mark.parametrize("bad", [{"learning_rate": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"tau": 0.0}])
def test_numbers_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(bad))} must be .* Write FedOpt"):
        FedOpt(**bad)
