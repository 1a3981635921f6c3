"""Retained benefit: planted shares come back, and the interval covers them as often as it says."""

from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.retained_benefit import (
    BANDS,
    RoundsBand,
    bands,
    measured_bands,
    retained_benefit,
    rounds_of,
    text,
)

SILENT, DENSE = {0: 2.0, 1: 2.1, 2: 1.9}, {0: 1.5, 1: 1.6, 2: 1.4}


def planted(share: float, silent: dict[int, float] = SILENT, dense: dict[int, float] = DENSE) -> dict[int, float]:
    return {seed: silent[seed] - share * (silent[seed] - dense[seed]) for seed in silent}


@pytest.mark.parametrize("share", [-0.5, 0.0, 0.25, 0.95, 1.0, 1.1])
def test_planted_share_is_found(share: float) -> None:
    found = retained_benefit(planted(share), silent=SILENT, dense=DENSE)
    assert found.value == pytest.approx(share)
    assert found.low == pytest.approx(share, abs=1e-6)  # nothing is random here: seeds only shift all arms
    assert found.high == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("share", [0.3, 0.95])
def test_interval_covers_the_true_share_as_often_as_it_says(seeds: int, share: float) -> None:
    draws = np.random.default_rng(seeds)
    trials, covered = 2000, 0
    for _ in range(trials):
        common = draws.normal(0, 0.02, seeds)  # of a seed, in all arms
        silent, dense, mine = (common + mean + draws.normal(0, 0.01, seeds) for mean in (2.0, 1.6, 2.0 - 0.4 * share))
        arms = [dict(enumerate(map(float, arm))) for arm in (mine, silent, dense)]
        found = retained_benefit(arms[0], silent=arms[1], dense=arms[2])
        covered += found.low <= share <= found.high
    assert 0.935 < covered / trials < 0.965


def test_interval_is_narrower_with_paired_seeds_than_with_shuffled_ones() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 5)
    silent, dense = ({seed: mean + noise[seed] for seed in range(5)} for mean in (2.0, 1.5))
    paired = retained_benefit(planted(0.7, silent, dense), silent=silent, dense=dense)
    mixed = planted(0.7, silent, dense)
    shuffled = {seed: mixed[(seed + 1) % 5] for seed in mixed}
    apart = retained_benefit(shuffled, silent=silent, dense=dense)
    assert paired.high - paired.low < 0.1 * (apart.high - apart.low)


def test_only_shared_seeds_count() -> None:
    found = retained_benefit({0: 1.75, 7: 9.0}, silent=SILENT, dense=DENSE)
    assert found.value == pytest.approx(0.5)


def test_one_seed_has_an_unbounded_interval() -> None:
    found = retained_benefit({0: 1.75}, silent=SILENT, dense=DENSE)
    assert (found.low, found.high) == (-inf, inf)
    assert text(found) == "50 %"


@pytest.mark.parametrize("loss", [inf, nan])
def test_divergence_retains_nothing(loss: float) -> None:
    found = retained_benefit({0: 1.5, 1: 1.6, 2: loss}, silent=SILENT, dense=DENSE)
    assert found.value == -inf
    assert text(found) == "diverged"


def test_harm_is_marked() -> None:
    assert "worse than silence" in text(retained_benefit(planted(-0.2), silent=SILENT, dense=DENSE))


def test_unknown_benefit_has_an_unbounded_interval() -> None:
    """Seeds disagree on whether lock step is better than silence."""
    found = retained_benefit({0: 1.0, 1: 1.0}, silent={0: 2.0, 1: 2.0}, dense={0: 1.0, 1: 2.5})
    assert (found.low, found.high) == (-inf, inf)


@pytest.mark.parametrize(
    ("losses", "silent", "dense", "reason"),
    [
        ({0: 1.0}, {1: 2.0}, {1: 1.0}, "share no seed"),
        ({0: 1.0}, {0: 1.0}, {0: 1.5}, "not better than silence"),
        ({0: 1.0}, {0: inf}, {0: 1.5}, "silent training diverged"),
        ({0: 1.0}, {0: 2.0}, {0: nan}, "dense training diverged"),
    ],
)
def test_unusable_baselines_are_refused(
    losses: dict[int, float], silent: dict[int, float], dense: dict[int, float], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        retained_benefit(losses, silent=silent, dense=dense)


# -- rounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "rounds"),
    [
        ("LocalSGD(period=8)", 125),
        ("DiLoCo(period=50, fragments=5) + Int8()", 20),
        ("PostLocalSGD(period=4, start=10)", 250),
        ("Float4()", 0),
        ("Gossip()", 0),
        ("Silent()", 0),
    ],
)
def test_rounds_are_steps_over_the_period_of_parameter_averages(recipe: str, rounds: float) -> None:
    assert rounds_of(resolve(recipe, 4), 1000) == rounds


def test_shares_are_grouped_by_rounds_without_recipes_of_every_step() -> None:
    found = list(bands([(49, 0.2), (50, 0.6), (99.9, 0.5), (0, 1.0), (5000, 0.97)]))
    assert [(each.rounds, each.retained, each.count) for each in found] == [
        ("below 50", "20 to 20 %", 1),
        ("50 to 100", "50 to 60 %", 2),
        ("800 or more", "97 to 97 %", 1),
    ]


def test_periods_of_all_bands_cover_each_period_of_a_training_once() -> None:
    known = [RoundsBand(least, most, 0.1, 0.9, 1) for least, most in pairwise(BANDS)]
    for steps in (1, 7, 50, 399, 400, 20_000, 123_457):
        for period in {1, 2, 3, 9, 50, 51, 400, 401, steps} & set(range(1, steps + 1)):
            assert [period in band.periods(steps) for band in known].count(True) == 1
            band = next(each for each in known if period in each.periods(steps))
            assert band.least <= steps / period < band.most


def test_more_rounds_retain_more_in_the_measured_recipes() -> None:
    """The rule that the documentation states: the least share of a band rises with its rounds."""
    least = [band.low for band in measured_bands()]
    assert len(least) >= 4
    assert least == sorted(least)
