"""Privacy loss: epsilons equal closed forms, and an independent accountant's."""

from __future__ import annotations

from math import comb, exp, log, log1p, sqrt

import pytest

from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import (
    PLD,
    RDP,
    discrete_gaussian_divergence,
    gaussian_epsilon,
    renyi_epsilon,
    sampled_gaussian_epsilon,
    skellam_divergence,
)


def sampled_divergence(order: int, rate: float, noise: float) -> float:
    """Of one sampled round, at a whole order, by the binomial sum of Mironov et al. 2019, section 3.3."""
    terms = [
        log(comb(order, k)) + k * log(rate) + (order - k) * log1p(-rate) + (k * k - k) / (2 * noise**2)
        for k in range(order + 1)
    ]
    largest = max(terms)
    return (largest + log(sum(exp(term - largest) for term in terms))) / (order - 1)


def independent_epsilon(rate: float, noise: float, rounds: int, delta: float) -> float:
    """With the conversion of Balle et al. 2020, which dp-accounting and opacus use."""
    return min(
        rounds * sampled_divergence(order, rate, noise) + log1p(-1 / order) - log(delta * order) / (order - 1)
        for order in range(2, 200)
    )


@pytest.mark.parametrize(("noise", "rounds"), [(0.5, 1), (1.0, 30), (4.0, 3), (20.0, 1), (2.0, 500)])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_full_participation_costs_what_the_exact_accountant_says(noise: float, rounds: int, delta: float) -> None:
    """PLD rounds losses up to a grid, so its epsilon is a little larger."""
    pytest.importorskip("dp_accounting")
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    ledger = PLDAccountant(value_discretization_interval=1e-3)
    ledger.compose(GaussianDpEvent(noise), rounds)
    exact = ledger.get_epsilon(delta)
    found = gaussian_epsilon(noise, rounds, delta)
    assert exact * (1 - 1e-4) <= found <= exact * (1 + 1e-9)
    assert gaussian_epsilon(noise * 0.999, rounds, delta) > exact * (
        1 + 1e-5
    )  # a negative control: a little less noise


@pytest.mark.parametrize("noise", [0.01, 0.5, 1.0, 4.0, 1e3])
@pytest.mark.parametrize("rounds", [1, 30, 1000])
def test_full_participation_costs_no_more_than_renyi_bounds(noise: float, rounds: int) -> None:
    delta = 1e-5
    bound = rounds / (2 * noise**2) + sqrt(2 * rounds * log(1 / delta)) / noise
    by_orders = renyi_epsilon(lambda order: rounds * order / (2 * noise**2), delta)
    assert gaussian_epsilon(noise, rounds, delta) <= by_orders * (1 + 1e-9)
    assert by_orders < bound or noise < 0.1  # orders nearer to 1 than those tried
    assert gaussian_epsilon(noise, 0, delta) == 0


def test_noise_that_hides_a_device_within_delta_costs_nothing() -> None:
    assert gaussian_epsilon(1e6, 1, 1e-5) == 0.0
    assert gaussian_epsilon(1e4, 1, 1e-5) > 0.0


@pytest.mark.parametrize(("rate", "noise", "rounds"), [(0.01, 1.0, 1000), (0.1, 2.0, 100), (0.3, 4.0, 50)])
def test_sampled_rounds_cost_what_an_independent_accountant_says(rate: float, noise: float, rounds: int) -> None:
    pytest.importorskip("dp_accounting")
    found = sampled_gaussian_epsilon(noise, rate, rounds, 1e-5, RDP)
    assert found == pytest.approx(independent_epsilon(rate, noise, rounds, 1e-5), rel=0.01)
    assert found != pytest.approx(independent_epsilon(rate, noise / 1.1, rounds, 1e-5), rel=0.01)
    tighter = sampled_gaussian_epsilon(noise, rate, rounds, 1e-5, PLD)
    assert 0.8 * found < tighter < found < gaussian_epsilon(noise, rounds, 1e-5)


@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "opacus"),
    [(0.01, 1.0, 1000, 2.1013652716), (0.1, 2.0, 100, 2.5805688087), (0.3, 4.0, 50, 2.4736867109)],
)
def test_sampled_rounds_cost_what_opacus_says(rate: float, noise: float, rounds: int, opacus: float) -> None:
    """Its numbers are of opacus 1.6.0: RDPAccountant().get_epsilon(1e-5), where it is not installed."""
    pytest.importorskip("dp_accounting")
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        wanted = opacus
    else:
        accountant = RDPAccountant()
        accountant.history.append((noise, rate, rounds))
        wanted = accountant.get_epsilon(1e-5)
        assert wanted == pytest.approx(opacus, rel=1e-6)
    assert sampled_gaussian_epsilon(noise, rate, rounds, 1e-5, RDP) == pytest.approx(wanted, rel=0.01)


def test_exact_losses_of_one_round_are_known_in_closed_form() -> None:
    """Balle & Wang 2018: delta of one Gaussian round at an epsilon; PLD finds that epsilon."""
    pytest.importorskip("dp_accounting")
    from statistics import NormalDist

    normal, noise = NormalDist().cdf, 1.5
    found = sampled_gaussian_epsilon(noise, 1.0 - 1e-12, 1, 1e-5, PLD)
    delta = normal(0.5 / noise - found * noise) - exp(found) * normal(-0.5 / noise - found * noise)
    assert delta == pytest.approx(1e-5, rel=0.02)


def test_little_noise_and_no_round() -> None:
    assert sampled_gaussian_epsilon(0.01, 0.1, 3, 1e-5, PLD) == gaussian_epsilon(0.01, 3, 1e-5)
    assert sampled_gaussian_epsilon(1.0, 0.1, 0, 1e-5) == 0.0


def divergence_of(order: float, logs: dict[int, float], moved: int) -> float:
    """Renyi's, between integers and the same integers moved, of the logarithms of their chances."""
    both = [place for place in logs if place - moved in logs]
    return log(sum(exp(order * logs[place] + (1 - order) * logs[place - moved]) for place in both)) / (order - 1)


@pytest.mark.parametrize("variance", [4.0, 30.0])
@pytest.mark.parametrize("order", [1.5, 4.0, 16.0])
def test_bounds_of_integer_noise_hold_and_are_near(variance: float, order: float) -> None:
    """In one dimension, against the divergence itself."""
    from decimal import Decimal

    from gossamer.federated.privacy.noise_sampling import _discrete_gaussian, _skellam

    for rule, bound in (
        (_skellam, skellam_divergence(order, 2.0, 2.0, variance)),
        (_discrete_gaussian, discrete_gaussian_divergence(order, 2.0, 2.0, variance, 1, 1)),
    ):
        half = rule(Decimal(variance), 150)
        total = half[0] + 2 * sum(half[1:])
        logs = {place: float((half[abs(place)] / total).ln()) for place in range(-150, 151)}
        exact = divergence_of(order, logs, 2)
        assert exact <= bound * (1 + 1e-6)
        assert bound <= 2.2 * exact or order * 2 > variance  # far from Gaussian


def test_many_small_shares_of_discrete_noise_cost_more() -> None:
    """A sum of discrete Gaussian integers that are hardly spread is not one: the gap grows."""
    one = discrete_gaussian_divergence(2.0, 1.0, 1.0, 10.0, 1, 100)
    assert one == pytest.approx(0.1)
    assert discrete_gaussian_divergence(2.0, 1.0, 1.0, 10.0, 2, 100) == pytest.approx(one, rel=1e-9)
    assert discrete_gaussian_divergence(2.0, 1.0, 1.0, 10.0, 100, 100) > 2 * one
