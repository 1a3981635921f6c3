"""benchmarks/calibration.py: its plan, and how often its intervals hold what they have not seen."""

from math import exp, log, sqrt
from random import Random
from statistics import fmean

import pytest
from benchmarks import calibration_report
from benchmarks.calibration_plan import (
    LONGEST_SECONDS,
    RATES,
    ROUND_TRIPS,
    Subject,
    cases,
    drawn,
    spread_out,
    steps_of,
    subjects,
)
from benchmarks.calibration_report import conformal, halves, one_network_out, page

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import read_network
from gossamer.observe.rank_record import warm_up
from gossamer.plan.estimate.calibration import COVERAGE, Calibration, PastForecast

pytestmark = pytest.mark.nightly


def planned(seconds=0.1, networks=22):
    return [*cases(networks, 3, 1, lambda subject, network: seconds)]


def test_at_least_sixty_runs_on_all_kinds():
    found = planned()
    assert len(found) == len({case.key for case in found}) == 66
    recipes = {case.subject.recipe for case in found}
    assert {case.subject.task for case in found} == {"digits", "small", "base"}
    assert recipes >= {subject.recipe for network in (0, 3) for subject in subjects(drawn(network, 1))}
    assert sum(bool(case.network.toml) for case in found) == 15
    assert all(is_coprime(7, len(subjects(drawn(number, 1)))) for number in (0, 3))


def is_coprime(one, other):
    return all(one % each or other % each for each in range(2, other + 1))


def test_networks_are_drawn_between_bounds_and_stay_the_same(tmp_path):
    for number in range(40):
        network = drawn(number, 1)
        assert network == drawn(number, 1) != drawn(number, 2)
        if network.toml:
            file = tmp_path / "network.toml"
            file.write_text(network.toml)
            assert [host.site for host in read_network(str(file), 4).hosts] == ["west", "west", "east", "east"]
        else:
            there = read_network(network.spec, 4)
            assert 0.95 * RATES[0] <= there.hosts[0].up_bits_per_second <= 1.05 * RATES[1]
            assert 0.95 * ROUND_TRIPS[0] <= there.default.round_trip_seconds <= 1.05 * ROUND_TRIPS[1]


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=4)", "DiLoCo(period=4)"])
@pytest.mark.parametrize("step_seconds", [0.001, 0.05, 0.3, 0.7])
def test_a_run_has_whole_periods_after_its_warm_up(recipe, step_seconds):
    steps = steps_of(recipe, step_seconds)
    period = resolve(recipe).strategy.steady_stage.schedule.period
    assert steps
    assert steps * step_seconds <= LONGEST_SECONDS
    assert (steps - warm_up(steps)) % period == 0


def test_what_takes_too_long_is_not_run():
    assert steps_of("Dense()", 2.0) == 0
    fast = Subject("digits", "Int8()")
    found = [*cases(8, 3, 1, lambda subject, network: 0.1 if subject == fast else 2.0)]
    assert {case.subject for case in found} == {fast}


def test_a_part_of_the_time_does_a_part_of_every_network():
    first = spread_out(planned())[:22]
    assert len({case.network.name for case in first}) == 22


# -- coverage: networks of which each has an error of its own, as where a model misses something of it


def pairs(networks, each, random, shared=0.1, own=0.05):
    missed = [random.gauss(0, shared) for _ in range(networks)]
    return [
        PastForecast(
            recipe="Dense()",
            family="dense",
            network=str(number),
            network_class="near",
            workers=4,
            estimated_seconds=0.1,
            measured_seconds=0.1 * exp(missed[number] + random.gauss(0, own)),
        )
        for number in range(networks)
        for _ in range(each)
    ]


def check_coverage(judge):
    """Over many studies, each of which is one number, so that runs on one network need not be independent."""
    random = Random(3)
    shares = [fmean(each.held for each in one_network_out(pairs(22, 3, random), judge)) - COVERAGE for _ in range(30)]
    deviation = sqrt(fmean(share**2 for share in shares) / len(shares))
    assert -4 * deviation < fmean(shares) < 4 * deviation + 2 / 64  # at most 2 / (n + 1) above


def narrow(past, pair):
    """Half of the scores lie between, not 80 % of them."""
    return Calibration(past).interval(pair.estimated_seconds, pair.family, pair.network_class, coverage=0.6)


def test_intervals_hold_networks_that_they_have_not_seen():
    check_coverage(conformal)


def test_narrower_ones_do_not():
    with pytest.raises(AssertionError):
        check_coverage(narrow)


def test_halves_hold_about_as_many(monkeypatch):
    monkeypatch.setattr(calibration_report, "HALVES", 40)
    found = halves(pairs(22, 3, Random(3)))
    assert len(found) == 40
    assert 0.6 < fmean(found) < 0.95


def test_the_page_says_what_was_held_and_what_was_not(tmp_path):
    some = pairs(22, 3, Random(5))
    judged = one_network_out(some)
    text = page(some, "Written by a test.", "picture.png")
    assert f"Coverage: **{100 * fmean(each.held for each in judged):.0f} %**" in text
    assert "| all | 66 |" in text
    assert text.count("| `Dense()` |") == sum(not each.held for each in judged)
    worst = max((each.pair for each in judged if not each.held), key=lambda one: abs(log(one.measured_seconds / 0.1)))
    assert f"| `Dense()` | {worst.network} |" in text.split("## Outside")[1].splitlines()[4]
    calibration_report.plot(judged, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
