"""What is timed is what runs: the same operations, and the same calls of the strategy's rules, as in a real session."""

from collections import Counter, defaultdict

import pytest
import torch
from support.virtual_workers import cluster, loss_of, network
from torch import nn

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import AveragingStage, GossipStage
from gossamer.base.aggregation import STEADY, AggregationContext
from gossamer.comm.echo_transport import ReplayTransport
from gossamer.plan.profile.exchange_timer import stage_timer, time_stage
from gossamer.train.synchronizers.stages import bucket_fragments

WORLD = 2
RECIPES = [
    "EveryStep() + Dense()",
    "EveryStep() + TopK(0.1)",
    "EveryStep(accumulate=3) + PowerSGD(2)",
    "EveryStep(delay=1) + Int8()",
    "LocalSGD(3) + Int8()",
    "LocalSGD(3, second_moment='agreed')",
    "DiLoCo(4, averaging='radial')",
    "DiLoCo(4, outer_momentum=0.5, fragments=2) + PowerSGD(2)",
    "DiLoCo(4, fragments=2, delay=1) + TopK(0.1)",
    "DelayedAveraging(delay=2)",
    "Gossip() + Ring()",
    "NoLoCo(2) + Ring()",
    "Gossip() + Int8() + Ring()",
]
EXCHANGES = (2, 3)  # of the timer; all ranks hear of each other in one of two rounds of gossip
PERIODS = 6  # of the session


def described(op):
    return op.name, op.bytes_sent(WORLD), [(tuple(each.shape), each.dtype) for each in op.tensors()]


class Recording:
    """A transport that keeps what rank 0 says, by the group among which it says it."""

    def __init__(self, transport, said, group="all"):
        self._transport, self._said, self._group = transport, said, group

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def answer(self, op):
        return self.begin(op)()

    def begin(self, op):
        if self.rank == 0:
            self._said[self._group].append(described(op))
        return self._transport.begin(op)

    def part(self, size):
        return Recording(self._transport.part(size), self._said, f"part of {size}")


@pytest.fixture
def rules(monkeypatch):
    """How often a strategy's or a mixing rule's own functions were called."""
    calls = Counter()

    def watch(rule):
        for name in ("offer", "land"):
            original = getattr(type(rule), name)

            def counted(*args, original=original, name=name, **options):
                calls[name] += 1
                return original(*args, **options)

            monkeypatch.setattr(type(rule), name, counted)
        return calls

    return watch


def rule_of(recipe):
    (stage,) = recipe.strategy.stages
    return stage.strategy.rule(recipe.compressor) if isinstance(stage, GossipStage) else stage.strategy


def trained(recipe):
    """{group: operations of rank 0} of a session of two workers."""
    said = defaultdict(list)

    def work(worker):
        model = network(worker.rank)
        rule = torch.optim.Adam if "second_moment" in repr(recipe) else torch.optim.SGD
        optimizer = rule(model.parameters(), lr=0.1)
        session = worker.attach(model, optimizer, recipe)
        for step in range(PERIODS * recipe.strategy.steady_stage.schedule.period):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        session._synchronizer.flush()

    cluster(work, WORLD, lambda transport: Recording(transport, said))
    return said


def timed(recipe, monkeypatch):
    """{group: operations} of two exchanges of each fragment."""
    said = defaultdict(list)
    model = network(0)
    parameters = dict(model.named_parameters())
    (stage,) = recipe.strategy.stages
    at = AggregationContext(step=STEADY, world=WORLD)
    fragments = bucket_fragments(stage, parameters, recipe.compressor, at)
    fresh = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    real_begin = ReplayTransport.begin
    with stage_timer(stage, fragments, recipe.compressor, WORLD, fresh) as timer:
        timer.exchange(0)
        whole = timer.compressor.transport

        def begin(self, op):
            said["all" if self is whole else f"part of {self.world}"].append(described(op))
            return real_begin(self, op)

        with monkeypatch.context() as patch:
            patch.setattr(ReplayTransport, "begin", begin)
            for number in EXCHANGES:
                timer.exchange(number)
    return said


@pytest.mark.parametrize("text", RECIPES)
def test_a_timed_exchange_says_what_a_session_says(text, monkeypatch):
    recipe = resolve(text, WORLD)
    real, replayed = trained(recipe), timed(recipe, monkeypatch)
    assert replayed.keys() == real.keys()
    for group, ops in replayed.items():
        assert real[group][-len(ops) :] == ops


@pytest.mark.parametrize("text", [text for text in RECIPES if "EveryStep" not in text])
def test_a_timed_exchange_calls_the_rules_as_often_as_a_session(text, rules, monkeypatch):
    recipe = resolve(text, WORLD)
    calls = rules(rule_of(recipe))
    trained(recipe)
    real = {name: count / WORLD / PERIODS for name, count in calls.items()}
    calls.clear()
    timed(recipe, monkeypatch)
    assert {name: count / (1 + len(EXCHANGES)) for name, count in calls.items()} == real
    assert set(real) == {"offer", "land"}


@pytest.mark.parametrize("text", RECIPES)
def test_timing_leaves_parameters_and_gradients_as_they_are(text):
    recipe = resolve(text, 3)
    parameters = {"a": nn.Parameter(torch.randn(50, 60)), "b": nn.Parameter(torch.randn(7))}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    kept = {name: (parameter.detach().clone(), parameter.grad) for name, parameter in parameters.items()}
    (stage,) = recipe.strategy.stages
    fragments = bucket_fragments(stage, parameters, recipe.compressor, AggregationContext(step=STEADY, world=3))
    fresh = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    sent = {name: tensor.clone() for name, tensor in fresh.items()}
    found = time_stage(stage, fragments, recipe.compressor, 3, fresh)
    for name, parameter in parameters.items():
        before, gradient = kept[name]
        assert torch.equal(before, parameter)
        assert parameter.grad is gradient
        assert torch.equal(sent[name], fresh[name])
    for bucket in found:
        assert min(*bucket["computing_seconds"], *bucket["engine_seconds"]) > 0
        assert len(bucket["computing_seconds"]) == len(bucket["engine_seconds"]) + 1
        if isinstance(stage, AveragingStage):
            assert min(bucket["offering_seconds"], bucket["landing_seconds"]) > 0


def test_a_site_is_timed_apart_from_what_goes_on_between_sites():
    recipe = resolve("LocalSGD(4, per_site=2)", 4)
    parameters = {"a": nn.Parameter(torch.randn(50, 60))}
    (stage,) = recipe.strategy.stages
    fragments = bucket_fragments(stage, parameters, Dense(), AggregationContext(step=STEADY, world=4))
    (found,) = time_stage(stage, fragments, Dense(), 4, {"a": torch.randn(50, 60)})
    assert len(found["engine_seconds"]) == 1


@pytest.mark.parametrize("text", ["EveryStep(global_batch=24, batch=2)", "EveryStep(global_batch=24, balance=True)"])
def test_a_step_of_a_global_batch_is_timed_as_one_exchange(text):
    recipe = resolve(text, 3)
    parameters = {"a": nn.Parameter(torch.randn(50, 60))}
    (stage,) = recipe.strategy.stages
    fragments = bucket_fragments(stage, parameters, recipe.compressor, AggregationContext(step=STEADY, world=3))
    (found,) = time_stage(stage, fragments, recipe.compressor, 3, {"a": torch.randn(50, 60)})
    assert len(found["engine_seconds"]) == 1
