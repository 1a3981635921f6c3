import json
from dataclasses import asdict, replace

import pytest
import torch

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.layout import Layout
from gossamer.comm.network import read_network
from gossamer.plan.advise import prices
from gossamer.plan.advise.candidates import WITHOUT_WAITING, Candidate, candidates
from gossamer.plan.advise.prices import (
    MOST_TIMED,
    Prediction,
    StepPricer,
    _shrunk,
    estimate_all,
    judged,
    kind_of,
    survivors,
)
from gossamer.plan.estimate.step_time import estimate_step_time, peer_step_seconds
from gossamer.plan.estimate.workload_profile import BucketProfile
from gossamer.plan.profile.gradient_statistics import GradientObserver
from gossamer.plan.profile.profile_runs import assume_profile
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.train.traffic.traffic import estimate_traffic

WORKERS, PARAMETERS = 4, 100_000
NETWORK = read_network("10mbit,20ms", WORKERS)
MODEL = assumed(PARAMETERS, resolve(None, WORKERS))
BASE = replace(assume_profile(MODEL, resolve(None, WORKERS), 0.05, WORKERS), buffer_bytes=(400, 400, 8))
FEW = [
    "Dense()",
    "Int8()",
    "TopK(density=0.01)",
    "PowerSGD(rank=2)",
    "EveryStep(delay=1) + OneBit()",
    "EveryStep(accumulate=4)",
    "LocalSGD(period=8) + Float4()",
    "DiLoCo(period=20, fragments=4, delay=4) + Int8()",
    "DelayedAveraging(delay=4)",
    "Gossip() + TopK(density=0.1) + Ring()",
]


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    monkeypatch.delenv("GOSSAMER_COLLECTIVE", raising=False)


@pytest.fixture(scope="module")
def pricer():
    return StepPricer(BASE, WORKERS)


def few(texts=FEW):
    return [Candidate(recipe=text) for text in texts]


# -- the pricer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", FEW)
def test_a_shared_profile_is_that_of_the_recipes_own(text, pricer):
    """All but its seconds, which are timed anew; with them replaced the estimate is the same to the bit."""
    recipe = resolve(text, WORKERS)
    model = assumed(PARAMETERS, recipe)
    own, shared = assume_profile(model, recipe, 0.05, WORKERS), pricer.profile(recipe)
    assert [each.shapes for each in shared.buckets] == [each.shapes for each in own.buckets]
    assert [each.fragment for each in shared.buckets] == [each.fragment for each in own.buckets]
    assert shared.control_bytes == own.control_bytes
    assert [len(each.engine_seconds) for each in shared.buckets] == [len(each.engine_seconds) for each in own.buckets]
    timed = replace(
        shared,
        buffer_bytes=(),
        rider_bytes=own.rider_bytes,
        backward_seconds=own.backward_seconds,
        buckets=own.buckets,
    )
    told = [estimate_step_time(recipe, each, NETWORK, WORKERS).step_seconds for each in (timed, own)]
    assert told[0] == told[1]


@pytest.mark.parametrize("text", FEW)
def test_traffic_is_that_of_the_recipes_own(text, pricer):
    recipe = resolve(text, WORKERS)
    told, own = pricer.traffic(recipe), estimate_traffic(recipe, assumed(PARAMETERS, recipe), workers=WORKERS)
    assert told.buckets == own.buckets
    assert told.residual_bytes == own.residual_bytes
    assert told.strategy_bytes == own.strategy_bytes
    assert 0 <= told.cycle_bytes_sent - own.cycle_bytes_sent <= 2 * 808  # its buffers, which the assumed model lacks


def test_a_compressor_is_timed_once_for_all_strategies(pricer, monkeypatch):
    timed = []
    from gossamer.plan.advise import prices

    real = prices.time_codec
    monkeypatch.setattr(prices, "time_codec", lambda *given: timed.append(given[3]) or real(*given))
    fresh = StepPricer(BASE, WORKERS)
    for text in ("Int8()", "EveryStep(accumulate=2) + Int8()", "EveryStep(delay=1) + Int8()", "LocalSGD(4) + Int8()"):
        fresh.profile(resolve(text, WORKERS))
    assert [repr(each) for each in timed if "Int8" in repr(each)] == [repr(resolve("Int8()", WORKERS).compressor)]
    before = len(timed)
    fresh.profile(resolve("LocalSGD(8) + Int8()", WORKERS))
    assert len(timed) == before
    fresh.profile(resolve("LocalSGD(8) + Float4()", WORKERS))
    assert len(timed) == before + 1


def test_large_buckets_are_timed_in_part_and_take_longer_in_proportion():
    layout = Layout.of({"a": (8 * MOST_TIMED, 2), "b": (3,)})
    assert MOST_TIMED <= _shrunk(layout).numel <= MOST_TIMED * 1.01
    assert _shrunk(layout).by_name["a"].shape[1:] == (2,)
    small = Layout.of({"a": (30, 2), "empty": (0, 4), "scalar": ()})
    assert _shrunk(small) == small


def test_a_bucket_of_empty_parameters_is_priced():
    layouts = [*MODEL.layouts, ("float64", Layout.of({"unused": (0, 3)}))]
    model = replace(MODEL, layouts=tuple(layouts), fragments=())
    pricer = StepPricer(assume_profile(model, resolve(None, WORKERS), 0.05, WORKERS), WORKERS)
    assert [each.excluded for each in estimate_all(few(), pricer.base, NETWORK, WORKERS, pricer=pricer)] == [None] * 10


# -- foretelling ------------------------------------------------------------------------------------------------------


def test_all_are_priced_in_order_and_what_is_out_stays_out(pricer):
    heard = []
    given = [*few(), Candidate(recipe="DGC(density=0.01)", excluded="SGD only")]
    found = estimate_all(given, BASE, NETWORK, WORKERS, lambda *said: heard.append(said), pricer=pricer)
    assert [each.recipe for each in found] == [each.recipe for each in given]
    assert found[-1].excluded == "SGD only"
    assert found[-1].step_seconds == 0.0
    assert all(each.step_seconds > 0 and each.bytes_sent > 0 for each in found[:-1])
    assert [said[:2] for said in heard] == [(place, len(given)) for place in range(len(given))]
    by_name = {each.recipe: each for each in found}
    assert by_name["Int8()"].bytes_sent < 0.3 * by_name["Dense()"].bytes_sent
    assert by_name["EveryStep(accumulate=4)"].passes == 4
    assert by_name["LocalSGD(period=8) + Float4()"].passes == 1
    assert by_name["Dense()"].rounds == 1.0
    assert by_name["EveryStep(accumulate=4)"].rounds == 0.25
    assert by_name["PowerSGD(rank=2)"].rounds == 2.0
    assert by_name["TopK(density=0.01)"].memory_bytes > 0 == by_name["Dense()"].memory_bytes
    json.dumps([asdict(each) for each in found], allow_nan=False)


def test_what_cannot_be_priced_is_out_with_the_reason(pricer):
    (found,) = estimate_all(few(["LocalSGD(period=4, per_site=3)"]), BASE, NETWORK, WORKERS, pricer=pricer)
    assert "could not be priced: 4 workers cannot be divided into sites of 3" in (found.excluded or "")


SOME = [
    *FEW[:6],
    "Float4()",
    "PowerSGD(rank=1)",
    "OneBit(feedback=False)",
    "EveryStep(delay=1) + OneBit(feedback=False)",
    "EveryStep(delay=1) + PowerSGD(rank=1)",
    "LocalSGD(period=4) + Int8()",
    *(
        f"DiLoCo(period={period}, outer_learning_rate=1.0, outer_momentum=0.5) + {compressor}"
        for period in (20, 50)
        for compressor in ("Int8()", "Float4()")
    ),
]


def some(statistics=None):
    found = candidates(MODEL, torch.optim.AdamW, statistics, WORKERS, NETWORK)
    return [each for each in found if each.recipe in SOME]


def left(found, network, pricer, statistics=None):
    told = estimate_all(found, BASE, read_network(network, WORKERS), WORKERS, pricer=pricer)
    return survivors(told, statistics, most=8)


def test_a_network_too_fast_to_save_anything_leaves_dense_alone(pricer):
    assert [each.recipe for each in left(some(), "unlimited", pricer)] == ["Dense()"]
    assert len(left(some(), "5mbit,20ms", pricer)) > 3


def test_long_round_trips_leave_recipes_with_fewer_rounds(pricer):
    near, far = (left(some(), each, pricer)[1:] for each in ("5mbit,1ms", "5mbit,500ms"))
    mean = [sum(each.rounds for each in found) / len(found) for found in (near, far)]
    assert mean[1] < 0.7 * mean[0]


def planted(gradient_of):
    draws, observer = torch.Generator().manual_seed(3), GradientObserver()
    for _ in range(4):
        observer.observe({"weight": gradient_of(draws)})
    return observer.statistics()


PLACES = torch.randperm(96 * 128, generator=torch.Generator().manual_seed(1))[:50]
ONE_DIRECTION = planted(lambda _: torch.outer(torch.ones(96), torch.linspace(1, 2, 128)))
FEW_LARGE = planted(
    lambda draws: torch.zeros(96 * 128).scatter(0, PLACES, torch.randn(50, generator=draws)).view(96, 128)
)
NOISE = planted(lambda draws: torch.randn(96, 128, generator=draws))


@pytest.mark.parametrize(("seen", "first"), [(ONE_DIRECTION, "PowerSGD(rank=1)"), (FEW_LARGE, "TopK(density=0.01)")])
def test_what_gradients_are_made_of_is_among_the_first_to_be_tried(seen, first, pricer):
    lock_step = [each for each in some(seen) if " + " not in each.recipe and "accumulate" not in each.recipe]
    assert first in [each.recipe for each in left(lock_step, "5mbit,1ms", pricer, seen)][1:3]
    in_noise = [each for each in some(NOISE) if " + " not in each.recipe and "accumulate" not in each.recipe]
    assert first not in [each.recipe for each in left(in_noise, "5mbit,1ms", pricer, NOISE)]


def test_half_a_network_is_not_the_same_as_a_slow_codec(pricer):
    """A twin whose codecs take no time would find the same for all rates: seconds do depend on the network."""
    slow, fast = (
        estimate_all(few(["Dense()"]), BASE, read_network(each, 4), 4, pricer=pricer) for each in ("5mbit", "1gbit")
    )
    assert slow[0].step_seconds > 2 * fast[0].step_seconds


# -- pruning -----------------------------------------------------------------------------------------------------------


def told(recipe, seconds, strategy=1.0, compressor=1.0, memory=0, passes=1):
    return Prediction(
        recipe=recipe,
        step_seconds=seconds,
        strategy_passes=strategy,
        compressor_passes=compressor,
        memory_bytes=memory,
        passes=passes,
    )


DENSE = told("Dense()", 1.0)
HALF = told("Dense(dtype='bfloat16')", 0.6)
INT8 = told("Int8()", 0.4)
TOPK = told("TopK(density=0.01)", 0.3, compressor=2.0)
SLOW_TOPK = told("TopK(density=0.1)", 0.35, compressor=2.0)
LOCAL = told("LocalSGD(period=8)", 0.2, strategy=1.5)


def names(found):
    return [each.recipe for each in found]


def reasons(found):
    return {each.recipe: each.excluded for each in found}


def test_survivors_begin_with_dense_and_continue_by_expected_seconds():
    found = survivors([TOPK, INT8, LOCAL, DENSE], None, most=10)
    assert names(found) == ["Dense()", "LocalSGD(period=8)", "Int8()", "TopK(density=0.01)"]
    assert [each.expected_seconds for each in found[1:]] == pytest.approx([0.3, 0.4, 0.6])


def test_every_candidate_is_told_of_and_the_others_with_a_reason():
    given = [DENSE, HALF, INT8, TOPK, SLOW_TOPK, LOCAL, replace(INT8, recipe="OneBit()", excluded="no such optimizer")]
    found = judged(given, None, most=10, memory_limit_bytes=1e9)
    assert sorted(names(found)) == sorted(names(given))
    assert found[0].recipe == "Dense()"
    why = reasons(found)
    assert why["OneBit()"] == "no such optimizer"
    assert why["TopK(density=0.1)"] == (
        "TopK(density=0.01) takes 300 ms for a backward pass, this one 350 ms, and it is expected to lose no less"
    )
    assert why["Dense(dtype='bfloat16')"].startswith("Int8() takes 400 ms")


def test_where_nothing_is_saved_only_dense_is_left():
    """Within a tenth of Dense(), the fastest of all included."""
    found = [
        DENSE,
        replace(HALF, step_seconds=0.95),
        replace(INT8, step_seconds=0.92),
        replace(LOCAL, step_seconds=0.91),
    ]
    assert names(survivors(found, None, most=10)) == ["Dense()"]
    why = reasons(judged(found, None, most=10))
    assert "less than 10% saved" in why["Int8()"]


def test_without_a_least_gain_changes_for_nothing_would_be_tried(monkeypatch):
    monkeypatch.setattr(prices, "LEAST_GAIN", 0.0)
    found = [DENSE, replace(INT8, step_seconds=0.92)]
    assert names(survivors(found, None, most=10)) == ["Dense()", "Int8()"]


def test_gains_are_held_against_half_precision_where_that_gains():
    found = [DENSE, HALF, replace(INT8, step_seconds=0.55)]  # 45 % less than Dense(), and 8 % less than bfloat16
    assert names(survivors(found, None, most=10)) == ["Dense()", "Dense(dtype='bfloat16')"]
    assert names(survivors(found[::2], None, most=10)) == ["Dense()", "Int8()"]


def test_steps_of_several_passes_are_held_against_as_many():
    """A step of four passes in 2 s beside one of 1 s; needing as many passes as Dense() needs."""
    accumulated = told("EveryStep(accumulate=4)", 2.0, passes=4)
    assert names(survivors([DENSE, accumulated], None, most=10)) == ["Dense()", "EveryStep(accumulate=4)"]
    assert accumulated.expected_seconds == 0.5
    assert names(survivors([DENSE, replace(accumulated, passes=1)], None, most=10)) == ["Dense()"]  # a twin


def test_what_does_not_fit_is_out_and_dense_never():
    found = judged([replace(DENSE, memory_bytes=10**12), replace(INT8, memory_bytes=2001)], None, 10, 2000.0)
    assert reasons(found)["Dense()"] is None
    assert reasons(found)["Int8()"] == "its state would need 2.0 kB without the model, and 2.0 kB are available"
    assert names(survivors([DENSE, replace(INT8, memory_bytes=2001)], None, 10)) == ["Dense()", "Int8()"]


def test_only_what_loses_no_less_in_both_ways_is_dominated():
    """A faster strategy that loses more is no reason against a compressor that loses more."""
    both = told("LocalSGD(period=8) + TopK(density=0.01)", 0.25, strategy=1.5, compressor=2.0)
    assert "LocalSGD(period=8) takes" in (reasons(judged([DENSE, LOCAL, both], None, 10))[both.recipe] or "")
    assert reasons(judged([DENSE, LOCAL, TOPK], None, 10))[TOPK.recipe] is None
    assert LOCAL.expected_passes < TOPK.expected_passes  # a twin that compares products would leave TopK out


def test_of_two_alike_one_stays():
    found = survivors([DENSE, INT8, replace(INT8, recipe="QSGD()")], None, most=10)
    assert names(found) == ["Dense()", "Int8()", "QSGD()"]


def test_what_is_far_behind_is_not_tried_unless_a_prior_may_be_as_wrong(monkeypatch):
    found = [DENSE, LOCAL, told("TopK(density=0.01)", 0.19, compressor=5.0)]  # expected: 0.3 and 0.95 seconds
    assert "3.2x that of LocalSGD(period=8)" in (reasons(judged(found, None, 10))[found[2].recipe] or "")
    monkeypatch.setattr(prices, "MOST_BEHIND", 4.0)
    assert reasons(judged(found, None, 10))[found[2].recipe] is None


def test_few_of_a_kind_and_no_more_than_asked_for():
    few = [told(f"TopK(density={d})", s, compressor=c) for d, s, c in [(0.1, 0.5, 1.5), (0.03, 0.4, 2), (0.01, 0.3, 3)]]
    found = judged([DENSE, *few, replace(INT8, step_seconds=0.6)], None, most=3)
    assert names([each for each in found if each.excluded is None]) == ["Dense()", "Int8()", "TopK(density=0.1)"]
    assert "3 recipes are expected" in (reasons(found)["TopK(density=0.03)"] or "")
    many = judged([DENSE, *few], None, most=10)
    assert "2 recipes of its kind, EveryStep + TopK + Complete" in (reasons(many)["TopK(density=0.01)"] or "")


def test_kinds_have_no_numbers():
    assert kind_of("LocalSGD(8) + Route(Feedback(TopK(0.01)))") == kind_of("LocalSGD(4) + TopK(0.1)")
    assert kind_of("LocalSGD(8) + TopK(0.01)") != kind_of("LocalSGD(8) + Int8()")


def test_recipes_that_align_momentum_are_priced(pricer):
    network = read_network("10mbit,100ms", pricer.workers)
    local, aligned = (
        pricer.step_time(resolve(f"LocalSGD(period=8{more}) + OneBit()", pricer.workers), network).step_seconds
        for more in ("", ", optimizer_state='align'")
    )
    assert aligned == pytest.approx(local, rel=0.5)


def test_recipes_by_speed_enter_the_race_of_unequal_workers():
    speeds, network = (1.0, 1.0, 1.0, 0.2), read_network("100mbit,1ms", WORKERS)
    base = replace(BASE, speeds=speeds)
    names = ("LocalSGD(period=8", "EveryStep(global_batch", "EveryStep(accumulate", "Dense()", "AsyncDiLoCo")
    found = candidates(MODEL, torch.optim.AdamW, None, WORKERS, NETWORK, speeds, 8)
    found = [each for each in found if each.recipe.startswith(names) and each.recipe.count("+") == 0]
    told = estimate_all(found, base, network, WORKERS, pricer=StepPricer(base, WORKERS))
    seconds = {each.recipe: each.step_seconds for each in told}
    assert seconds["Dense()"] > 5 * 0.05
    assert seconds["LocalSGD(period=8, balance=True)"] < 0.3 * seconds["LocalSGD(period=8)"]
    raced = [each.recipe for each in survivors(told, None, most=6)]
    assert raced[0] == "Dense()"
    assert any("balance=True" in each for each in raced)
    assert "AsyncDiLoCo(period=24)" in raced
    assert all("balance=True" in each or each in WITHOUT_WAITING for each in raced[1:])


# -- workers that do not wait for each other --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", WITHOUT_WAITING)
def test_recipes_without_common_steps_have_a_lower_bound(recipe):
    slow = StepPricer(replace(BASE, speeds=(1.0, 1.0, 1.0, 0.2)), WORKERS)
    resolved = resolve(recipe, WORKERS)
    fast, narrow = (slow.seconds(resolved, read_network(text, WORKERS)) for text in ("100gbit", "1mbit"))
    assert fast == pytest.approx(0.05 * WORKERS / 3.2, rel=0.05)
    assert narrow > fast
    (found,) = estimate_all([Candidate(recipe=recipe)], slow.base, NETWORK, WORKERS, pricer=slow)
    assert found.excluded is None
    assert found.interval is None
    assert found.bytes_sent > 0


def test_a_step_has_its_share_of_the_compression_of_a_period_at_the_speed_of_the_worker():
    shapes = {"weight": (4, 4)}
    bucket = BucketProfile(
        dtype="float32", shapes=shapes, ready_seconds=0.0, computing_seconds=[0.2, 0.1], engine_seconds=[0.1]
    )
    measured = replace(BASE, backward_seconds=1.0, rest_seconds=0.0, buckets=[bucket], speeds=(1.0, 0.5))
    assert peer_step_seconds(resolve("AsyncDiLoCo(period=4)", 2), measured, 2) == pytest.approx((1.1, 2.2))
    assert peer_step_seconds(resolve("ParameterServer('async')", 2), measured, 2) == pytest.approx((1.4, 2.8))
