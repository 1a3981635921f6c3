"""Privacy accountant: epsilon spent, budgets, adaptive clip norms and selection by coins."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from support.seeded_bits import SeededBits
from torch import nn

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import (
    CentralPrivacy,
    DistributedPrivacy,
    FedAvg,
    LocalPrivacy,
    SecureAggregation,
)
from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import gaussian_epsilon
from gossamer.errors import AttachError, RecipeError
from gossamer.federated.model_state import ModelState
from gossamer.federated.privacy.accountant import (
    PoissonSelection,
    PrivacyAccountant,
    accountant_for,
    next_clip,
    private_selection,
)
from gossamer.federated.privacy.clipping_and_noise import PrivateSum
from gossamer.federated.server.selection import SelectionPolicy, Uniform


def accountant_of(privacy: CentralPrivacy, **options: bool) -> PrivacyAccountant:
    return PrivacyAccountant(privacy, cohort=10, clients=100, feedback=options.get("feedback", False))


def test_every_version_costs_everybody_where_sampling_hides_them() -> None:
    pytest.importorskip("dp_accounting")
    accountant = accountant_of(CentralPrivacy(noise=1.0, clip=1.0))
    spent = [accountant.epsilon]
    for _ in range(3):
        accountant.committed([1, 2])
        spent.append(accountant.epsilon)
    assert spent == [accountant.privacy.epsilon_after(rounds, 10, 100) for rounds in range(4)]
    assert spent[3] < gaussian_epsilon(1.0, 3, 1e-5) / 2


@pytest.mark.parametrize(
    "accountant",
    [
        accountant_of(CentralPrivacy(noise=1.0, clip=1.0), feedback=True),
        accountant_of(CentralPrivacy(noise=1.0, clip=1.0, sampling="fixed")),
        PrivacyAccountant(LocalPrivacy(noise=2.0), cohort=10, clients=100, feedback=False),
    ],
    ids=["feedback", "fixed", "local"],
)
def test_a_version_costs_those_in_it_where_sampling_does_not(accountant: PrivacyAccountant) -> None:
    for cohort in ([1, 2], [2, 3], [4, 5], [2]):
        accountant.given(cohort)
        accountant.committed(cohort)
    assert accountant.epsilon == gaussian_epsilon(1.0, 3, 1e-5)  # of device 2


def test_it_ends_before_the_budget_is_passed() -> None:
    accountant = accountant_of(CentralPrivacy(noise=1.0, clip=1.0, budget=15.0, sampling="fixed"))
    while not accountant.exhausted:
        accountant.committed(range(10))
    assert accountant.epsilon <= 15.0 < gaussian_epsilon(1.0, accountant.rounds + 1, 1e-5)
    assert accountant.rounds == 7
    assert "the privacy budget is spent: epsilon is 14.19 after 7 rounds" in accountant.why
    with pytest.raises(ValueError, match="the first round already costs epsilon"):
        accountant_of(CentralPrivacy(noise=1.0, clip=1.0, budget=1.0, sampling="fixed"))


def test_it_continues_from_what_was_kept() -> None:
    privacy = CentralPrivacy(noise=1.0, sampling="fixed")
    accountant, again = accountant_of(privacy), accountant_of(privacy)
    for share in (0.1, 0.9, 0.2):
        accountant.committed([7, 8], share)
    again.load_state_dict(accountant.state_dict())
    assert (again.epsilon, again.clip, again.rounds) == (accountant.epsilon, accountant.clip, 3)
    assert accountant.clip != privacy.first_clip
    again.committed([7], 0.5)
    assert again.epsilon > accountant.epsilon


def test_a_delta_of_a_whole_device_is_refused() -> None:
    with pytest.raises(ValueError, match="delta=1e-03"):
        accountant_of(CentralPrivacy(noise=1.0, delta=0.01))


def state_of(*layers: nn.Module) -> ModelState:
    return ModelState.of(nn.Sequential(nn.Linear(3, 4), *layers))


def test_the_guard_of_a_strategy() -> None:
    privacy = CentralPrivacy(noise=1.0, clip=1.0)
    assert accountant_for(FedAvg(), Dense(), state_of(), 100) is None
    for text, amplified in (
        ("Dense()", True),
        ("TopK(0.01)", False),
        ("Int8(stochastic=True)", True),
        ("Route(Int8(stochastic=True), rest=TopK(0.01))", False),  # feedback for what is no matrix
    ):
        resolved = resolve(f"FedAvg(fraction=0.1, privacy={privacy!r}) + {text}")
        state = ModelState.of(nn.Linear(64, 2048))
        accountant = accountant_for(resolved.strategy, resolved.compressor, state, 100)  # type: ignore[arg-type]
        assert accountant is not None
        assert (accountant.cohort, accountant.amplified, accountant.on_server) == (10, amplified, True)
        assert [each.shape for each in accountant.blank] == [(64 * 2048 + 2048,)]


def test_the_guard_of_a_secure_sum_counts_on_the_fewest_that_stay() -> None:
    strategy = FedAvg(fraction=1.0, secure=SecureAggregation(threshold=0.6), privacy=DistributedPrivacy(noise=1.0))
    accountant = accountant_for(strategy, Dense(), state_of(), 100)
    assert accountant is not None
    assert not accountant.on_server
    accountant.committed([0])
    assert accountant.epsilon == strategy.privacy.epsilon_after(1, 60, 100, entries=16, bits=16)  # type: ignore[union-attr]


def test_averaged_buffers_are_refused_and_counters_do_not_matter() -> None:
    strategy = FedAvg(privacy=CentralPrivacy(noise=1.0))
    with pytest.raises(AttachError, match="GroupNorm"):
        accountant_for(strategy, Dense(), state_of(nn.BatchNorm1d(4)), 100)
    plain = nn.BatchNorm1d(4, track_running_stats=False)
    assert accountant_for(strategy, Dense(), state_of(plain), 100) is not None
    counted = nn.Linear(2, 2)
    counted.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    accountant = accountant_for(strategy, Dense(), ModelState.of(counted), 100)
    assert accountant is not None
    assert accountant.blank[0].numel() == 6


class _ByLoss(SelectionPolicy):
    def choose(self, available, count, index):  # type: ignore[no-untyped-def]
        return list(available)[:count]


def test_selection_is_by_coins_or_blind() -> None:
    accountant = accountant_of(CentralPrivacy(noise=1.0))
    drawn = private_selection(accountant, Uniform(3))
    assert isinstance(drawn, PoissonSelection)
    assert drawn.rate == 0.1
    assert private_selection(accountant, drawn) is drawn
    fixed = Uniform(3)
    assert private_selection(accountant_of(CentralPrivacy(noise=1.0), feedback=True), fixed) is fixed
    assert private_selection(accountant_of(CentralPrivacy(noise=1.0, sampling="fixed")), fixed) is fixed
    with pytest.raises(RecipeError, match="cohort can be empty"):
        private_selection(accountant_of(LocalPrivacy(noise=1.0)), drawn)
    with pytest.raises(RecipeError, match=r"Choose by Uniform\(\)"):
        private_selection(accountant, _ByLoss())
    with pytest.raises(RecipeError, match="rate"):
        private_selection(accountant, PoissonSelection(0.5))


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_it_converges_to_the_quantile(quantile: float) -> None:
    privacy = CentralPrivacy(noise=1.0, delta=1e-4, quantile=quantile, first_clip=1.0, sampling="fixed")
    accountant = PrivacyAccountant(
        privacy, cohort=100, clients=1000, feedback=False, blank=[torch.empty(2)], bits=SeededBits(1)
    )
    random = torch.Generator().manual_seed(0)
    visited: list[float] = []
    for number in range(100):
        norms = torch.empty(100).log_normal_(mean=1.0, std=0.5, generator=random)  # of median 2.72
        sums = PrivateSum(accountant, privacy)
        for norm in norms:
            sums.add((torch.stack([norm, torch.zeros(())]),), 1.0, 1)
        accountant.committed(range(100), sums.share_below())
        visited += [accountant.clip] if number >= 40 else []
    wanted = float(torch.distributions.LogNormal(1.0, 0.5).icdf(torch.tensor(quantile)))
    assert sum(visited) / len(visited) == pytest.approx(wanted, rel=0.08)


def test_it_moves_by_the_formula_whatever_noise_says() -> None:
    assert next_clip(2.0, 0.5, 0.5, 0.2) == 2.0
    assert next_clip(2.0, 1.0, 0.5, 0.2) == pytest.approx(2.0 * 2.718281828459045**-0.1)
    assert next_clip(2.0, 1e9, 0.5, 0.2) == next_clip(2.0, 1.0, 0.5, 0.2) < 2.0
    assert next_clip(2.0, -1e9, 0.5, 0.2) == next_clip(2.0, 0.0, 0.5, 0.2) > 2.0


def test_sizes_and_pairs_are_those_of_independent_coins() -> None:
    policy, rounds = PoissonSelection(0.2, SeededBits(4)), 4000
    drawn = [policy.choose(range(30), 6, index) for index in range(rounds)]
    sizes = [len(each) for each in drawn]
    mean = sum(sizes) / rounds
    variance = sum((size - mean) ** 2 for size in sizes) / (rounds - 1)
    assert abs(mean - 6.0) < 4.5 * sqrt(4.8 / rounds)
    assert abs(variance / 4.8 - 1) < 4.5 * sqrt(2 / rounds) * 1.1  # a cohort of fixed size would have none
    both = sum(3 in each and 17 in each for each in drawn)
    assert abs(both - 0.04 * rounds) < 4.5 * sqrt(0.04 * rounds)
    assert all(each == sorted(each) for each in drawn)


def test_coins_cannot_be_guessed_from_a_seed() -> None:
    one, other = PoissonSelection(0.5), PoissonSelection(0.5)
    assert one.choose(range(200), 100, 0) != other.choose(range(200), 100, 0)
    assert PoissonSelection(1.0).choose([2, 5], 1, 0) == [2, 5]
    with pytest.raises(ValueError, match="rate"):
        PoissonSelection(0.0)
