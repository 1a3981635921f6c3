"""One price of a step: explain, simulate, advise and the choice of `auto`, for the same inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from support.nightly import once_each
from torch import nn
from torch.optim import SGD

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import GossipStage
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import dtype_of
from gossamer.comm.network import Network, read_network
from gossamer.comm.network.cost.step_simulator import BACKWARD_SHARE
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import GossamerError
from gossamer.events import Attached
from gossamer.plan.advise import prices as candidate_prices
from gossamer.plan.advise.prices import StepPricer
from gossamer.plan.estimate.step_cost import step_cost
from gossamer.plan.estimate.step_time import estimate_step_time
from gossamer.plan.profile import profile_runs
from gossamer.plan.profile.profile_runs import assume_profile
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.plan.simulate import ForecastClock, NetworkSchedule
from gossamer.train.auto.ladder import LadderRung
from gossamer.train.auto.network_fit import FittedLine
from gossamer.train.auto.pricing import step_seconds
from gossamer.train.auto.rung_cost import rung_costs
from gossamer.train.session.lifecycle_events import begun
from gossamer.train.synchronizers.stages import bucket_fragments
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import estimate_traffic

WORKERS, STEP_SECONDS = 4, 0.1
CODEC_SECONDS, ENGINE_SECONDS = 4e-10, 1e-10  # of an entry
NETWORKS = ["10gbit,0.1ms", "1gbit,1ms", "100mbit,20ms", "20mbit,80ms"]
RUNGS = [
    "Dense()",
    "Int8()",
    "TopK(density=0.01)",
    "PowerSGD(rank=4)",
    "LocalSGD(period=8) + Int8()",
    "DiLoCo(period=20) + Float4()",
]
RECIPES = [
    *RUNGS,
    "EveryStep(delay=1) + Int8()",
    "EveryStep(accumulate=2)",
    "LocalSGD(period=4, per_site=2)",
    "Gossip() + Ring()",
]


@pytest.fixture(autouse=True)
def planted_codecs(monkeypatch):
    """Codecs take equally long whoever times them."""

    def time_codec(dtype, layout, stage, compressor, workers):
        ops = trace_ops(Recipe(compressor=compressor), layout, dtype_of(dtype), workers)
        count = 1 if isinstance(stage, GossipStage) else len(ops)
        return {
            "computing_seconds": [layout.numel * CODEC_SECONDS / (count + 1)] * (count + 1),
            "engine_seconds": [layout.numel * ENGINE_SECONDS / max(1, count)] * count,
            "offering_seconds": layout.numel * ENGINE_SECONDS,
            "landing_seconds": layout.numel * ENGINE_SECONDS,
        }

    monkeypatch.delenv("GOSSAMER_COLLECTIVE", raising=False)
    for module in (profile_runs, candidate_prices):
        monkeypatch.setattr(module, "time_codec", time_codec)


@cache
def transformer(recipe: Recipe) -> Attached:
    return assumed(6_000_000, recipe)


def convolutions(recipe: Recipe) -> Attached:
    """With running statistics, which are broadcast in every step."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64))
    fragments = bucket_fragments(
        recipe.strategy.steady_stage, dict(model.named_parameters()), recipe.compressor, AggregationContext()
    )
    return begun(model, SGD(model.parameters(), 0.1), recipe, fragments, SimulatedGroup(1).transports[0])


def prices(text: str, network: Network, model) -> dict[str, tuple[float, float]]:
    """(seconds, bytes) of a step, by the command whose price it is."""
    recipe, plain = resolve(text, WORKERS), resolve(None, WORKERS)
    attached = model(recipe)
    profile = assume_profile(attached, recipe, STEP_SECONDS, WORKERS)
    explained = estimate_step_time(recipe, profile, network, WORKERS)
    simulated = ForecastClock(lambda _: profile, NetworkSchedule(((0.0, network),)), WORKERS).step(recipe, 0.0)
    row = step_cost(recipe, attached, network, WORKERS, STEP_SECONDS, lambda: profile)
    pricer = StepPricer(assume_profile(model(plain), plain, STEP_SECONDS, WORKERS), WORKERS)
    return {
        "explain": (explained.step_seconds, estimate_traffic(recipe, attached, workers=WORKERS).bytes_sent),
        "simulate": (simulated.seconds, simulated.bytes_sent),
        "simulate --shapes": (row.seconds, row.bytes_sent),
        "advise": (pricer.step_time(recipe, network).step_seconds, pricer.traffic(recipe).bytes_sent),
    }


@once_each("recipe, network", RECIPES, NETWORKS)
def test_all_commands_price_a_step_equally(recipe, network):
    found = prices(recipe, read_network(network, WORKERS), transformer)
    assert found == dict.fromkeys(found, found["explain"])


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(density=0.01)", "LocalSGD(period=4, per_site=2)"])
def test_all_commands_count_the_broadcasts_of_running_statistics(recipe):
    network = read_network("100mbit,20ms", WORKERS)
    found = prices(recipe, network, convolutions)
    assert found == dict.fromkeys(found, found["explain"])
    attached = convolutions(resolve(recipe, WORKERS))
    assert len(attached.buffers) == 6  # two means, two variances, two counters
    silent = prices(recipe, network, lambda resolved: replace(convolutions(resolved), buffers=()))
    assert found["explain"] > silent["explain"]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("recipe", RUNGS)
def test_auto_prices_a_step_within_six_percent_of_the_simulated_one(recipe, network):
    """On a line that it knows. It leaves out headers, five percent of what is sent."""
    resolved, there = resolve(recipe, WORKERS), read_network(network, WORKERS)
    model = transformer(resolved)
    simulated = estimate_step_time(
        resolved, assume_profile(model, resolved, STEP_SECONDS, WORKERS), there, WORKERS
    ).step_seconds
    rung = LadderRung(written=resolved, steps_adaptive=1.0, steps_sgd=1.0)
    (cost,) = rung_costs([rung], model, WORKERS, adaptive=False)
    line = FittedLine(
        seconds_per_byte=8 / there.hosts[0].up_bits_per_second, trip_seconds=there.default.round_trip_seconds / 2
    )
    numel = sum(layout.numel for _, layout in model.layouts)
    codec_seconds = numel * (CODEC_SECONDS + ENGINE_SECONDS) / cost.period
    hidden_seconds = BACKWARD_SHARE * STEP_SECONDS * (1 - cost.shares[0])
    estimated = step_seconds(cost, line, STEP_SECONDS, hidden_seconds, codec_seconds)
    assert 0.94 * simulated < estimated <= simulated * (1 + 1e-9)


@pytest.mark.parametrize("recipe", ["ParameterServer()", "Gossip('pairwise')"])
def test_steps_of_workers_that_do_not_wait_for_each_other_have_no_price(recipe):
    resolved, network = resolve(recipe, WORKERS), read_network("1gbit,1ms", WORKERS)
    plain = resolve(None, WORKERS)
    profile = assume_profile(transformer(plain), plain, STEP_SECONDS, WORKERS)
    with pytest.raises(GossamerError, match="cannot be estimated"):
        estimate_step_time(resolved, profile, network, WORKERS)
    assert step_cost(resolved, transformer(resolved), network, WORKERS, STEP_SECONDS, lambda: profile).at_least
