"""Calibration: an interval from past errors holds what comes next as often as it says."""

from math import exp, log, sqrt
from random import Random

import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import Network, Path, read_network
from gossamer.plan.estimate import calibration
from gossamer.plan.estimate.calibration import (
    COVERAGE,
    LEAST_SPREAD,
    Calibration,
    ForecastInterval,
    PastForecast,
    fewest_pairs,
    network_class,
    quantiles,
    recipe_family,
    shipped,
)


def pair(ratio, family="dense", where="near", spread=0.0):
    return PastForecast(
        recipe="Dense()",
        family=family,
        network="1gbit",
        network_class=where,
        workers=4,
        estimated_seconds=1.0,
        measured_seconds=ratio,
        spread=spread,
    )


def test_it_takes_nine_pairs_for_two_ends_of_eighty_percent():
    assert [fewest_pairs(coverage) for coverage in (0.5, 0.8, 0.9)] == [3, 9, 19]
    with pytest.raises(ValueError, match=r"takes 9 at least.*benchmarks/calibration"):
        Calibration([pair(1.0)] * 8)


def test_ends_are_order_statistics():
    assert quantiles([*range(9)], 0.8) == (0, 8)
    assert quantiles([*range(1, 20)], 0.8) == (2, 18)  # 2 of 20 places on either side
    assert quantiles([*range(1, 100)], 0.8) == (10, 90)
    assert quantiles([*range(3)], 0.5) == (0, 2)


def test_an_interval_is_the_ratios_between():
    ratios = [0.5, 0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3, 2.0]
    found = Calibration(pair(ratio) for ratio in ratios).interval(10.0, "dense", "near")
    assert (found.low_seconds, found.high_seconds) == pytest.approx((5.0, 20.0))
    assert (found.coverage, found.pairs, found.kind) == (COVERAGE, 9, "dense, near")


def test_it_holds_the_forecast_where_all_past_ones_erred_one_way():
    slower = Calibration(pair(1.2 + 0.01 * place) for place in range(9)).interval(1.0, "dense", "near")
    assert (slower.low_seconds, slower.high_seconds) == pytest.approx((1.0, 1.28))
    faster = Calibration(pair(0.8 - 0.01 * place) for place in range(9)).interval(1.0, "dense", "near")
    assert (faster.low_seconds, faster.high_seconds) == pytest.approx((0.72, 1.0))


def test_it_widens_with_what_the_inputs_differed():
    past = Calibration(pair(exp(0.01 * (place - 4))) for place in range(9))
    widths = [
        log(found.high_seconds / found.low_seconds)
        for found in (past.interval(1.0, "dense", "near", spread) for spread in (0.0, LEAST_SPREAD, 2 * LEAST_SPREAD))
    ]
    assert widths == pytest.approx([0.08, 0.08 * sqrt(2), 0.08 * sqrt(5)])


def test_like_forecasts_speak_before_others():
    known = [pair(1.0 + 0.01 * each, "dense", "near") for each in range(9)]
    known += [pair(2.0 + 0.01 * each, "local", where) for each in range(5) for where in ("near", "far")]
    found = Calibration(known)
    assert found.interval(1.0, "dense", "near").kind == "dense, near"
    assert found.interval(1.0, "dense", "far").kind == "dense"
    assert found.interval(1.0, "local", "far").kind == "local"
    assert found.interval(1.0, "gossip", "far").kind == "all"
    assert found.interval(1.0, "gossip", "far").pairs == 19
    assert found.interval(1.0, "dense", "near").high_seconds == pytest.approx(1.08)


def test_it_survives_json():
    known = Calibration([pair(1.0 + 0.1 * each, spread=0.1) for each in range(9)], {"commit": "abc"})
    again = Calibration.from_json(known.to_json())
    assert (again.pairs, again.provenance) == (known.pairs, known.provenance)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_no_step_takes_is_refused(seconds):
    with pytest.raises(ValueError, match="positive number"):
        pair(seconds)


# -- coverage on synthetic data: errors of many kinds, whose distributions the method does not know ----------------

TRIALS, PAST = 2000, 39
LEAST_Z = 4.0


def skewed(random):
    """Mostly right, sometimes much too low: as where a machine is busy now and then."""
    return random.expovariate(5.0) - 0.1


def wide_tails(random):
    return 0.05 * random.gauss(0, 1) / max(0.01, abs(random.gauss(0, 1)))


def by_inputs(random):
    return random.gauss(0, 0.1)


def check_coverage(interval_of, error):
    """Fresh past and fresh future in every trial, so that trials are independent: exactly binomial.

    The quantiles of 39 scores leave 4 of 40 places on either side, so that the coverage is 80 % exactly.
    """
    random, held = Random(7), 0
    for _ in range(TRIALS):
        spreads = [random.choice((0.0, 0.05, 0.2)) for _ in range(PAST + 1)]
        *past, (spread, last) = ((each, error(random) * calibration.scale(each) / 0.05) for each in spreads)
        found = interval_of(Calibration(pair(exp(score), spread=each) for each, score in past), spread)
        held += found.holds(exp(last))
    deviation = sqrt(TRIALS * COVERAGE * (1 - COVERAGE))
    assert abs(held - TRIALS * COVERAGE) < LEAST_Z * deviation


def conformal(past, spread):
    return past.interval(1.0, "dense", "near", spread)


def too_narrow(past, spread):
    found = conformal(past, spread)
    return ForecastInterval(
        low_seconds=found.low_seconds**0.8,
        high_seconds=found.high_seconds**0.8,
        coverage=COVERAGE,
        pairs=PAST,
        kind="",
        spread=spread,
    )


def without_spread(past, spread):
    """As wide for unsteady inputs as for steady ones."""
    return conformal(past, 0.0)


@pytest.mark.parametrize("error", [skewed, wide_tails, by_inputs])
def test_it_holds_the_next_as_often_as_it_says(error):
    check_coverage(conformal, error)


@pytest.mark.parametrize("broken", [too_narrow, without_spread])
def test_a_narrower_one_is_noticed(broken):
    with pytest.raises(AssertionError):
        check_coverage(broken, by_inputs)


# -- kinds, and what is shipped


@pytest.mark.parametrize(
    ("recipe", "family"),
    [
        ("Dense", "dense"),
        ("Dense(dtype='bfloat16')", "dense"),
        ("TopK(0.01)", "compressed"),
        ("PowerSGD(2)", "compressed"),
        ("EveryStep(delay=1) + Int8()", "delayed"),
        ("DelayedAveraging(delay=4)", "delayed"),
        ("LocalSGD(8)", "local"),
        ("DiLoCo(10) + Int8()", "local"),
        ("Gossip()", "gossip"),
    ],
)
def test_families_of_recipes(recipe, family):
    assert recipe_family(resolve(recipe, 4)) == family


def test_classes_of_networks():
    assert network_class(read_network("1gbit,1ms", 4)) == "near"
    assert network_class(read_network("1gbit,5ms", 4)) == "far"
    host = read_network("1gbit", 1).hosts[0]
    assert network_class(Network(hosts=(host, host), paths={frozenset(("",)): Path(loss=0.1)})) == "sites"


def test_what_is_shipped_reports_where_it_comes_from():
    found = shipped()
    assert found.provenance.keys() >= {"commit", "machine", "command"}
    for each in found.pairs:
        assert each.family == recipe_family(resolve(each.recipe, each.workers))
    assert found.interval(1.0, "gossip", "far").holds(1.0)
