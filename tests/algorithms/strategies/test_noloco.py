"""NoLoCo: an outer optimizer with one peer per round, against its paper's equations written out in a few lines."""

from __future__ import annotations

import math

import pytest
import torch
from support.gossip_rounds import LAYOUT, Flock, draws
from support.resumed_training import adamw, check_resume
from support.training_loops import START, close, run
from support.virtual_workers import network, parameters, train_step
from torch import Tensor

from gossamer.algorithms.gossip.rules import MOMENTUM, SLOW, OuterMomentum
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import DiLoCo, NoLoCo
from gossamer.algorithms.topologies import Complete, RandomPeers, Ring
from gossamer.base.layout import Layout
from gossamer.errors import RecipeError

ONE = Layout.of({"w": (1,)})
PUBLISHED = OuterMomentum(learning_rate=0.7, momentum=0.5, pull=0.7)


def pair(rule: OuterMomentum, slow: tuple[float, float], fast: tuple[float, float]) -> Flock:
    xs = [torch.tensor([x], dtype=torch.float64) for x in fast]
    flock = Flock(rule, RandomPeers(), xs, ONE)
    for memory, phi in zip(flock.memories, slow, strict=True):
        memory[SLOW].fill_(phi)
    return flock


def test_one_round_of_two_workers_by_hand() -> None:
    """Delta .2 and .4, mean .3; delta = .21 + .7 (.5 - phi)."""
    flock = pair(PUBLISHED, (1.0, 0.0), (1.2, 0.4)).rounds(1)
    assert [float(memory[MOMENTUM]) for memory in flock.memories] == pytest.approx([-0.14, 0.56])
    assert [float(x) for x in flock.xs] == pytest.approx([0.86, 0.56])
    assert float(flock.mean) == pytest.approx(0.5 + 0.7 * 0.3)


def test_without_gradients_two_workers_ring_towards_each_other() -> None:
    """z^2 - (1 + alpha - gamma) z + alpha = 0: 1, .3, -.26, -.358, ..., with an envelope of sqrt(alpha)^t."""
    flock, differences = pair(PUBLISHED, (1.0, 0.0), (1.0, 0.0)), [1.0]
    for _ in range(20):
        flock.round()
        differences.append(float(flock.xs[0] - flock.xs[1]))
    assert differences[:4] == pytest.approx([1.0, 0.3, -0.26, -0.358])
    assert all(abs(each) <= 2 * math.sqrt(0.5) ** t for t, each in enumerate(differences))


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_the_mean_over_workers_does_not_depend_on_the_pull(world: int) -> None:
    xs = draws(world)
    means = []
    for pull in (0.1, 0.7, 2.0):
        flock = Flock(OuterMomentum(0.7, 0.5, pull), RandomPeers(), xs, LAYOUT)
        means.append([flock.round() and flock.mean for _ in range(6)])
    for others in means[1:]:
        for a, b in zip(means[0], others, strict=True):
            close(a, b, 1e-13)


def test_a_neighbor_that_is_not_finite_is_left_out() -> None:
    flock = pair(PUBLISHED, (1.0, 0.0), (1.2, math.nan)).rounds(1)
    assert float(flock.xs[0]) == pytest.approx(1.0 + 0.7 * 0.2)


# -- in training -------------------------------------------------------------------------------------------------------


def by_hand(steps: int, period: int, world: int, seed: int, *, gamma: float = 0.7) -> list[list[Tensor]]:
    """Each worker's parameters after each step."""
    models = [network(0) for _ in range(world)]
    inner = [adamw(model) for model in models]
    phi, delta = [START.clone() for _ in range(world)], [torch.zeros_like(START) for _ in range(world)]
    paths = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            train_step(model, optimizer, step, rank)
        if step % period == period - 1:
            moved = [parameters(model) - slow for model, slow in zip(models, phi, strict=True)]
            groups = [[rank, *RandomPeers().sends_to(rank, world, step // period, seed)] for rank in range(world)]
            delta = [
                0.5 * delta[rank]
                + 0.7 * torch.stack([moved[peer] for peer in group]).mean(0)
                - gamma * (phi[rank] - torch.stack([phi[peer] for peer in group]).mean(0))
                for rank, group in enumerate(groups)
            ]
            phi = [slow + each for slow, each in zip(phi, delta, strict=True)]
            for model, slow in zip(models, phi, strict=True):
                torch.nn.utils.vector_to_parameters(slow.clone(), model.parameters())
        paths.append([parameters(model) for model in models])
    return paths


@pytest.mark.parametrize("world", [2, 3, 4])
def test_training_is_the_papers_rule(world: int) -> None:
    recipe = Recipe(strategy=NoLoCo(period=3), topology=RandomPeers())
    traces = run(recipe, 12, world=world, rule=adamw)
    (seed,) = {trace.session._stages.seed for trace in traces}
    wanted = by_hand(12, 3, world, seed)
    for rank, trace in enumerate(traces):
        for step, x in enumerate(trace.path):
            close(x, wanted[step][rank])
    if world == 4:  # of two workers, slow parameters are always the same
        with pytest.raises(AssertionError):
            close(traces[0].path[-1], by_hand(12, 3, world, seed, gamma=-0.7)[-1][0])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_with_all_workers_as_neighbors_it_is_heavy_ball_above_the_mean_difference(momentum: float) -> None:
    recipe = Recipe(strategy=NoLoCo(4, 1.0, momentum, pull=1.0), topology=Complete())
    traces = run(recipe, 12, rule=adamw)
    for trace in traces[1:]:
        close(trace.path[-1], traces[0].path[-1])
    (diloco, *_) = run(DiLoCo(4, 1.0, momentum), 12, rule=adamw)
    if momentum:  # DiLoCo's is Nesterov's
        with pytest.raises(AssertionError):
            close(traces[0].path[-1], diloco.path[-1])
    else:
        close(traces[0].path[-1], diloco.path[-1])


def test_what_is_merged_is_the_mean_of_all_workers() -> None:
    traces = run("NoLoCo(3) + RandomPeers()", 9, world=4, rule=adamw)
    mean = torch.stack([trace.path[-1] for trace in traces]).mean(0)
    for trace in traces:
        close(trace.merged[-1], mean)


def test_resumed_training_is_the_same_bit_for_bit() -> None:
    check_resume("NoLoCo(3) + RandomPeers()", [4, 6])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"period": 0}, "period must be a number of steps"),
        ({"period": 4, "outer_learning_rate": -0.1}, "outer_learning_rate must be 0 or more"),
        ({"period": 4, "outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\)"),
        ({"period": 4, "pull": 3.1}, r"below 2 \+ 2 outer_momentum = 3, got 3.1.*Write NoLoCo\(period=4, pull=1.0\)"),
        ({"period": 4, "outer_learning_rate": 0.0}, "pull must be above 0"),
    ],
)
def test_noloco_rejects(options: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NoLoCo(**options)  # type: ignore[arg-type]


def test_a_compressor_is_refused_with_a_line_to_write() -> None:
    with pytest.raises(
        RecipeError, match=r"Write NoLoCo\(period=4\) \+ RandomPeers\(\) without a compressor, or DiLoCo\(period=4\)"
    ):
        resolve("NoLoCo(4) + RandomPeers() + Int8()")


def test_its_text_rebuilds_it() -> None:
    assert parse("NoLoCo(50, pull=1.0) + Ring()").terms == (NoLoCo(50, pull=1.0), Ring())
