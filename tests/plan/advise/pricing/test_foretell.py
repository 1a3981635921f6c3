import json
from dataclasses import asdict, replace

import pytest
import torch

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.layout import Layout
from gossamer.comm.network import read_network
from gossamer.plan.advise.pricing.candidates import Candidate, candidates
from gossamer.plan.advise.pricing.foretell import foretell
from gossamer.plan.advise.pricing.pruning import survivors
from gossamer.plan.advise.pricing.step_pricing import MOST_TIMED, StepPricer, _shrunk
from gossamer.plan.cost.step_time import estimate_step_time
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
    from gossamer.plan.advise.pricing import step_pricing

    real = step_pricing.time_codec
    monkeypatch.setattr(step_pricing, "time_codec", lambda *given: timed.append(given[3]) or real(*given))
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


# -- foretelling ------------------------------------------------------------------------------------------------------


def test_all_are_priced_in_order_and_what_is_out_stays_out(pricer):
    heard = []
    given = [*few(), Candidate(recipe="DGC(density=0.01)", excluded="SGD only")]
    found = foretell(given, BASE, NETWORK, WORKERS, lambda *said: heard.append(said), pricer=pricer)
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
    (found,) = foretell(few(["LocalSGD(period=4, per_site=3)"]), BASE, NETWORK, WORKERS, pricer=pricer)
    assert "could not be priced: 4 workers do not make sites of 3" in (found.excluded or "")


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
    told = foretell(found, BASE, read_network(network, WORKERS), WORKERS, pricer=pricer)
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
        foretell(few(["Dense()"]), BASE, read_network(each, 4), 4, pricer=pricer) for each in ("5mbit", "1gbit")
    )
    assert slow[0].step_seconds > 2 * fast[0].step_seconds
