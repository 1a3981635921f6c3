"""Privacy accountant in whole federations: releases are bounded, noisy and accounted for, whatever networks do."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from support.federations import Federation, federate, model_of, one_pass
from support.rounds_by_hand import rounds_made, rounds_of
from support.seeded_bits import SeededBits
from torch import nn

from gossamer.algorithms.strategies.federated_rules import CentralPrivacy, FedAvg, LocalPrivacy
from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import gaussian_epsilon
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.errors import RecipeError
from gossamer.federated.client.functions import Round, Update
from gossamer.federated.privacy import accountant

BAD = VirtualNetwork(round_trip_seconds=0.1, jitter_seconds=0.2, loss=0.2, duplicate=0.2, dead_after_seconds=1e9)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise and coins in every run: bounds on what is random would fail once in a while."""
    monkeypatch.setattr(accountant, "SystemBits", lambda: SeededBits(12))


def first_version() -> torch.Tensor:
    model = model_of()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def epsilons(run: Federation) -> list[float]:
    return [each.epsilon for each in run.commits if each.epsilon is not None]


def test_without_noise_or_clipping_it_is_the_plain_mean() -> None:
    plain = federate("FedAvg(fraction=1.0)", clients=4, rounds=3)
    private = federate("FedAvg(fraction=1.0, privacy=CentralPrivacy(1e-12, clip=100.0))", clients=4, rounds=3)
    assert torch.allclose(private.parameters, plain.parameters, rtol=0, atol=1e-8)
    halved = federate("FedAvg(fraction=1.0, privacy=CentralPrivacy(1e-12, clip=1.0))", clients=4, rounds=3)
    assert not torch.allclose(halved.parameters, plain.parameters, rtol=0, atol=0.1)  # the twin: clipped


@pytest.mark.parametrize(
    ("privacy", "compared"),
    [(None, True), (CentralPrivacy(1.0, clip=1.0), False), (LocalPrivacy(1.0, clip=1.0), True)],
)
def test_under_central_privacy_contributions_are_not_compared(privacy: Any, compared: bool) -> None:
    """One device's contribution must not decide whether another's counts."""
    rounds = rounds_of(FedAvg(privacy=privacy), clients=20)
    assert (rounds.admission.limits.largest_ratio is not None) is compared


@pytest.mark.parametrize("text", ["Dense()", "TopK(0.5)", "Int8()", "RandomK(0.5, feedback=False)"])
def test_one_device_moves_a_version_by_the_clip_norm_over_the_cohort(text: str) -> None:
    def shouting(model: nn.Module, told: Round) -> Update:
        """A device whose update is of any size, and which says that it has seen everything."""
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(10.0 ** (told.client % 5))
        return Update(samples=10**6)

    recipe = f"FedAvg(fraction=0.5, privacy=CentralPrivacy(1e-12, clip=0.5, sampling='fixed')) + {text}"
    run = federate(recipe, clients=8, rounds=1, function=shouting)
    assert len(run.commits[0].reports) == 4
    moved = float((run.parameters - first_version()).norm())
    assert moved <= 0.5 * (1 + 1e-6)
    alone = f"FedAvg(fraction=1.0, privacy=CentralPrivacy(1e-12, clip=0.5)) + {text}"
    assert float((federate(alone, clients=1, rounds=1, function=shouting).parameters - first_version()).norm()) > 0.1


def test_every_round_tells_what_was_spent() -> None:
    run = federate("FedAvg(fraction=1.0, privacy=CentralPrivacy(2.0, clip=1.0, delta=0.01))", clients=4, rounds=5)
    assert epsilons(run) == [gaussian_epsilon(2.0, rounds, 0.01) for rounds in range(1, 6)]
    assert [each.epsilon for each in federate("FedAvg()", rounds=2).commits] == [None, None]


@pytest.mark.parametrize("net", [None, BAD], ids=["good", "bad"])
def test_the_federation_ends_at_its_budget_and_gives_the_reason(net: VirtualNetwork | None) -> None:
    recipe = "FedAvg(fraction=0.5, privacy=CentralPrivacy(2.0, clip=1.0, delta=0.01, budget=6.0, sampling='fixed'))"
    run = federate(recipe, clients=4, rounds=1000, net=net)
    assert len(run.commits) < 60
    assert epsilons(run)[-1] <= 6.0
    assert epsilons(run) == sorted(epsilons(run))
    assert "the privacy budget is spent" in run.rounds.why_exhausted
    parts = [sum(client in each.reports for each in run.commits) for client in range(4)]
    assert epsilons(run)[-1] == gaussian_epsilon(2.0, max(parts), 0.01)
    assert gaussian_epsilon(2.0, max(parts) + 1, 0.01) > 6.0
    assert federate(recipe, clients=4, rounds=2).rounds.why_exhausted == ""


def test_cohorts_are_drawn_by_coins_and_an_empty_one_makes_a_version() -> None:
    pytest.importorskip("dp_accounting")
    recipe = "FedAvg(fraction=0.125, privacy=CentralPrivacy(2.0, clip=1.0, delta=0.01, accountant='rdp'))"
    run = federate(recipe, clients=8, rounds=30)
    sizes = [len(each.reports) for each in run.commits]
    assert len(sizes) == 30
    assert 0 in sizes
    assert abs(sum(sizes) - 30) < 4.5 * sqrt(30 * 8 * 0.125 * 0.875)
    assert epsilons(run) == [run.rounds.accountant.privacy.epsilon_after(n, 1, 8) for n in range(1, 31)]  # type: ignore[union-attr]
    assert epsilons(run)[-1] < gaussian_epsilon(2.0, 30, 0.01) / 1.5


def test_released_versions_hold_the_noise_that_is_accounted_for() -> None:
    def still(model: nn.Module, told: Round) -> Update:
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        return Update(samples=1)

    recipe = "FedAvg(fraction=1.0, privacy=CentralPrivacy(3.0, clip=0.5, delta=0.1))"
    seen = first_version()
    run = federate(recipe, clients=2, rounds=100, function=still)
    drawn = run.parameters - seen
    deviation = 3.0 * 0.5 / 2 * sqrt(100)  # of a sum of 100 versions' noise
    z = (float((drawn / deviation).square().mean()) - 1) * sqrt(len(seen) / 2)
    assert abs(z) < 4.5
    assert float(drawn.norm()) > 0.2 * deviation


def test_local_noise_stays_on_the_device_and_reports_tell_nothing() -> None:
    run = federate("FedAvg(fraction=0.5, privacy=LocalPrivacy(4.0, delta=0.01))", clients=4, rounds=3, net=BAD)
    told = [report for each in run.commits for report in each.reports.values()]
    assert {(each.samples, each.steps, each.train_seconds, len(each.metrics)) for each in told} == {(1, 1, 0.0, 0)}
    parts = [sum(client in each.reports for each in run.commits) for client in range(4)]
    assert epsilons(run)[-1] >= gaussian_epsilon(2.0, max(parts), 0.01)


def test_local_noise_is_spent_by_every_task_also_one_that_does_not_count() -> None:
    """All eight are chosen for every round, and half of them are too late for its version: they were heard all the
    same. The twin counts who is in a version."""
    recipe = "FedAvg(fraction=0.5, privacy=LocalPrivacy(4.0, delta=0.01, budget=8.0))"
    run = federate(recipe, clients=8, rounds=50, over_selection=1.0)
    counted = [sum(client in each.reports for each in run.commits) for client in range(8)]
    spent = epsilons(run)
    assert min(counted) < max(counted) or len(run.commits) > max(counted)
    assert spent == [gaussian_epsilon(2.0, rounds, 0.01) for rounds in range(1, len(run.commits) + 1)]
    assert spent[-1] <= 8.0 < gaussian_epsilon(2.0, len(run.commits) + 1, 0.01)
    assert "the privacy budget is spent" in run.rounds.why_exhausted


def test_coins_without_noise_on_the_server_are_refused() -> None:
    coins = accountant.PoissonSelection(0.2, SeededBits(1))
    with pytest.raises(RecipeError, match="can be empty and have no mean"):
        federate("FedAvg()", policy=lambda model, **options: rounds_made(model, **{**options, "selection": coins}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"late": "count", "round_seconds": 1.0}, 'late="drop"'),
        ({"fewest": 2}, "fewest"),
        ({"over_selection": 0.5}, "over"),
    ],
)
def test_rounds_that_would_void_the_accounting_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        federate("FedAvg(fraction=0.5, privacy=CentralPrivacy(1.0, delta=0.01))", clients=6, **options)


def test_a_device_whose_training_diverged_is_left_out() -> None:
    def diverged(model: nn.Module, told: Round) -> Update:
        found = one_pass(model, told)
        if told.client == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return found

    recipe = "FedAvg(fraction=1.0, privacy=CentralPrivacy(1e-12, clip=100.0))"
    run = federate(recipe, clients=3, rounds=2, function=diverged)
    assert [sorted(each.reports) for each in run.commits] == [[0, 2], [0, 2]]
    assert run.parameters.isfinite().all()


def test_a_server_that_begins_again_has_spent_what_it_had() -> None:
    recipe = "FedAvg(fraction=1.0, privacy=CentralPrivacy(2.0, delta=0.01))"
    run, other = federate(recipe, clients=4, rounds=3), federate(recipe, clients=4, rounds=1)
    other.rounds.load_state_dict(run.rounds.state_dict())
    assert other.rounds.accountant is not None
    assert run.rounds.accountant is not None
    assert (other.rounds.accountant.epsilon, other.rounds.accountant.clip) == (
        run.rounds.accountant.epsilon,
        run.rounds.accountant.clip,
    )
    assert other.rounds.accountant.epsilon == gaussian_epsilon(2.0, 3, 0.01)
