"""Privacy terms: what each costs, and what does not go together with noise."""

from __future__ import annotations

from dataclasses import dataclass
from math import asinh, ceil, exp, hypot, sqrt

import pytest
import torch
from laws.subjects import EVERY

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, point_to_point
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import (
    Aggregator,
    CentralPrivacy,
    CohortSummary,
    DistributedPrivacy,
    FedAvg,
    FederatedStrategy,
    LocalPrivacy,
    SecureAggregation,
)
from gossamer.algorithms.strategies.federated_rules.privacy import terms
from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import (
    PLD,
    gaussian_epsilon,
    renyi_epsilon,
    sampled_gaussian_epsilon,
)
from gossamer.algorithms.strategies.federated_rules.privacy.integer_grid import SPARE, TAIL, WIDEST
from gossamer.algorithms.strategies.federated_rules.privacy.terms import (
    DISCRETE_GAUSSIAN,
    SAMPLE,
    TABLE_DISTANCE,
    remembers,
)
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors
from gossamer.errors import RecipeError


def test_a_recipe_with_privacy_is_read_back() -> None:
    for text in (
        "FedAvg(privacy=CentralPrivacy(noise=1.0, clip=0.5, budget=8.0)) + TopK(0.01)",
        "FedAvg(privacy=CentralPrivacy(1.0, quantile=0.3))",
        "FedAvg(privacy=LocalPrivacy(noise=20.0)) + Int8(stochastic=True)",
    ):
        resolved = resolve(text)
        assert resolve(repr(resolved)) == resolved


def test_sampling_counts_only_where_it_hides_anything() -> None:
    pytest.importorskip("dp_accounting")
    privacy = CentralPrivacy(noise=1.5, clip=1.0)
    amplified = sampled_gaussian_epsilon(1.5, 0.02, 50, 1e-5, PLD)
    full = gaussian_epsilon(1.5, 50, 1e-5)
    assert privacy.epsilon_after(50, 20, 1000) == amplified < full / 3
    assert privacy.epsilon_after(50, 20, 1000, feedback=True) == full
    assert privacy.epsilon_after(50, 1000, 1000) == full
    assert CentralPrivacy(noise=1.5, sampling="fixed").epsilon_after(50, 20, 1000) == full
    assert LocalPrivacy(noise=3.0).epsilon_after(50, 20, 1000) == full  # any two contributions are 2 S apart
    assert privacy.epsilon_after(0, 20, 1000) == 0.0


@pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian"])
def test_integers_cost_a_little_more_than_numbers(mechanism: str) -> None:
    privacy = DistributedPrivacy(noise=1.0, mechanism=mechanism)
    full = renyi_epsilon(lambda order: 10 * order / 2, 1e-5)
    most = 1.05 if mechanism == "skellam" else 1.02  # whole orders only
    assert full <= privacy.epsilon_after(10, 60, 1000, entries=10_000, bits=16) < most * full
    assert privacy.epsilon_after(0, 60, 1000) == 0.0
    assert DistributedPrivacy(noise=0.5, mechanism=mechanism).epsilon_after(10, 60, 1000, entries=10_000) > 2 * full


@pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian"])
def test_integers_have_a_finite_epsilon_however_many_the_rounds(mechanism: str) -> None:
    """Above 40 rounds are accounted for in parts, which is a looser bound."""
    privacy = DistributedPrivacy(noise=1.0, mechanism=mechanism)
    rounds = (1, 10, 20, 30, 50, 100, 1000)
    spent = [privacy.epsilon_after(each, 10, 100, entries=1000, bits=16) for each in rounds]
    assert spent == sorted(spent)
    for each, epsilon in zip(rounds, spent, strict=True):
        exact = gaussian_epsilon(1.0, each, 1e-5)
        assert exact <= epsilon < (1.12 if epsilon < 40 else 3.5) * exact


def test_draws_by_table_are_accounted_for() -> None:
    """Their error costs (1 + exp(epsilon)) times itself of delta; where that is more, nothing is promised."""
    privacy = DistributedPrivacy(noise=4.0, mechanism=DISCRETE_GAUSSIAN)
    assert privacy.epsilon_after(100, 60, 100, entries=10**6, bits=24) < 1.01 * renyi_epsilon(
        lambda order: 100 * order / 32, 1e-5
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terms, "TABLE_DISTANCE", 4e-15)
        assert privacy.epsilon_after(100, 60, 100, entries=10**6, bits=24) == float("inf")


def test_a_distance_costs_of_delta_on_both_sides() -> None:
    divergence = lambda order: 0.01 * order  # noqa: E731
    exact, distance = renyi_epsilon(divergence, 1e-5), 1e-7
    more = renyi_epsilon(divergence, 1e-5, distance=distance)
    assert more > exact
    assert renyi_epsilon(divergence, 1e-5 - (1 + exp(more)) * distance) == pytest.approx(more, rel=1e-9)
    assert renyi_epsilon(divergence, 1e-5, distance=1e-5) == float("inf")


def test_a_table_leaves_out_less_than_is_accounted_for() -> None:
    """By Chernoff's bound, of both tails: a Skellam number is beyond x with a chance of at most
    exp(-x asinh(x / v) + sqrt(x^2 + v^2) - v)."""

    def beyond(variance: float, tail: float) -> float:
        x = ceil(tail * sqrt(variance)) + SPARE
        return 2 * exp(-x * asinh(x / variance) + hypot(x, variance) - variance)

    for variance in (1e-3, 0.3, 1.0, 9.0, 100.0, 1e4, WIDEST**2):
        rounding = 2 * (TAIL * sqrt(variance) + SPARE + 1) * 2.0**-128
        assert beyond(variance, TAIL) + rounding < TABLE_DISTANCE
        assert beyond(variance, 5) > TABLE_DISTANCE or variance < 100  # the twin


def test_an_adapted_clip_costs_what_noise_says() -> None:
    privacy = CentralPrivacy(noise=1.0)
    for cohort in (10, 100, 1000):
        together = privacy.sum_noise_of(cohort) ** -2 + (2 * privacy.count_noise_of(cohort)) ** -2
        assert together == pytest.approx(1.0)
        assert privacy.sum_noise_of(cohort) > 1.0
    assert privacy.sum_noise_of(1000) < 1.0001
    assert CentralPrivacy(noise=1.0, clip=0.5).sum_noise_of(10) == 1.0


@dataclass(frozen=True, repr=False)
class _Largest(Aggregator):
    def combine(self, contributions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return contributions.max(0).values


class _Buffered(FedAvg):
    asynchronous = True  # type: ignore[assignment]


class _BySteps(FedAvg):
    needs_steps = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (FedAvg(aggregator=_Largest(), privacy=CentralPrivacy(noise=1.0)), "aggregator="),
        (_Buffered(privacy=CentralPrivacy(noise=1.0)), r"Write FedAvg\(privacy="),
        (_BySteps(privacy=CentralPrivacy(noise=1.0)), r"Write FedAvg\(privacy="),
        (FedAvg(secure=SecureAggregation(), privacy=CentralPrivacy(noise=1.0)), "DistributedPrivacy"),
        (FedAvg(secure=SecureAggregation(), privacy=LocalPrivacy(noise=1.0)), "DistributedPrivacy"),
        (FedAvg(privacy=DistributedPrivacy(noise=1.0)), "SecureAggregation"),
    ],
)
def test_what_would_void_the_promise_is_refused(strategy: FederatedStrategy, said: str) -> None:
    assert strategy.privacy is not None
    with pytest.raises(RecipeError, match=said):
        strategy.privacy.check(strategy, Dense())


def test_local_noise_is_not_fed_back() -> None:
    with pytest.raises(RecipeError, match="mostly noise"):
        resolve("FedAvg(privacy=LocalPrivacy(1.0)) + TopK(0.01)")
    written = "FedAvg(privacy=LocalPrivacy(noise=1.0)) + Int8(stochastic=True)"  # what the error says to write
    assert not remembers(resolve(written).strategy, resolve(written).compressor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("noise=0.0", "noise must be above 0"),
        ("noise=1.0, delta=0.0", "delta must be between"),
        ("noise=1.0, budget=0.0", "budget must be an epsilon"),
        ("noise=1.0, clip=-1.0", "clip must be a norm"),
        ("noise=1.0, quantile=1.0", "quantile must be between"),
        ("noise=1.0, count_noise=0.4", "count_noise must be above half"),
        ("noise=1.0, sampling='all'", "sampling must be"),
        ("noise=1.0, accountant='gdp'", "accountant must be"),
    ],
)
def test_wrong_numbers_are_refused(wrong: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        resolve(f"FedAvg(privacy=CentralPrivacy({wrong}))")


@pytest.mark.parametrize("compressor", EVERY, ids=repr)
def test_what_remembers_is_found_without_numbers(compressor: Compressor) -> None:
    like = FlatTensors(torch.zeros(SAMPLE.numel), SAMPLE)
    wanted = bool(point_to_point.begin(compressor, like, AggregationContext()))
    assert remembers(FedAvg(), compressor) == wanted
    if isinstance(compressor, Feedback):
        assert wanted


STRATEGIES = [noun for noun in NOUNS.values() if issubclass(noun, FederatedStrategy)]


@pytest.mark.parametrize("noun", STRATEGIES, ids=lambda noun: noun.__name__)
def test_a_strategy_that_reports_it_reads_no_reported_steps(noun: type[FederatedStrategy]) -> None:
    """Its next version is the same whatever devices say of their steps, or it is refused with privacy."""
    from gossamer.algorithms.recipes.catalog import example_of

    strategy = resolve(example_of(noun)).strategy
    assert isinstance(strategy, FederatedStrategy)
    made: list[torch.Tensor] = []
    for steps in (1.0, 7.0):
        parameters = torch.tensor([1.0, -2.0])
        means = [torch.tensor([0.5, 0.25]) for _ in range(strategy.contribution_count)]
        cohort = CohortSummary(contributions=4, clients=40, steps=steps)
        strategy.apply(parameters, strategy.server_memory(parameters), means, cohort)
        made.append(parameters)
    assert strategy.needs_steps or torch.equal(*made)
