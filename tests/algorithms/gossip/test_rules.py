"""Rules of gossip averaging: plain averaging and push-sum, on small graphs and without sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support.gossip_rounds import LAYOUT, Flock, Lopsided, draws
from torch import Tensor

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.gossip.rules import (
    MASS,
    NUMBERS,
    Averaging,
    Choco,
    GossipOffer,
    Memory,
    MixingRule,
    NeighborMessage,
    PushSum,
)
from gossamer.algorithms.topologies import Complete, Exponential, Hierarchy, RandomPeers, Ring, Topology, Torus
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import AttachError

TOPOLOGIES = [Complete(), Ring(), Torus(), Exponential(), Exponential(one_peer=True), Hierarchy(3), RandomPeers()]


# -- averaging --------------------------------------------------------------------------------------------------------


def check_mean(rule: MixingRule, topology: Topology, world: int) -> None:
    xs = draws(world)
    flock = Flock(rule, topology, xs).rounds(12)
    assert float((flock.mean - torch.stack(xs).mean(0)).abs().max()) < 1e-14, "the mean moved"


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_mixing_moves_nothing_in_sum(topology: Topology, world: int) -> None:
    check_mean(Averaging(), topology, world)
    check_mean(Averaging(0.3), topology, world)


@dataclass(frozen=True)
class Biased(Averaging):
    """Listens to the first neighbour only, whose weight is nobody else's to give."""

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, heard: Sequence[NeighborMessage]
    ) -> Tensor:
        return super().land(x, layout, memory, offer, heard[:1])


def test_the_mean_check_catches_who_does_not_listen() -> None:
    with pytest.raises(AssertionError, match="the mean moved"):
        check_mean(Biased(), Ring(), 8)
    with pytest.raises(AssertionError, match="the mean moved"):
        check_mean(Averaging(), Lopsided(), 5)


def test_whole_numbers_average_to_the_bit() -> None:
    xs = [torch.arange(LAYOUT.numel, dtype=torch.float32) * 4 * rank for rank in range(4)]
    for x in Flock(Averaging(), Complete(), xs).rounds(1).xs:
        assert torch.equal(x, torch.stack(xs).mean(0))
    alike = Flock(Averaging(), Ring(), [xs[3] / 7] * 5).rounds(3)
    assert all(torch.equal(x, xs[3] / 7) for x in alike.xs), "equal numbers moved"


def check_decay(topology: Topology, world: int, rate: float, step_size: float = 1.0) -> None:
    """Started in the second eigenvector, every round leaves exactly |lambda_2| of it."""
    values, vectors = torch.linalg.eigh(topology.mixing(world))
    order = values.abs().argsort(descending=True)
    xs = [entry.repeat(LAYOUT.numel) for entry in vectors[:, order[1]]]
    flock = Flock(Averaging(step_size), topology, xs)
    for _ in range(5):
        before = flock.distance
        flock.round()
        assert flock.distance / before == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("topology", [Ring(), Torus(), Hierarchy(4)], ids=repr)
def test_the_distance_shrinks_as_the_graph_says(topology: Topology) -> None:
    check_decay(topology, 8, topology.second_eigenvalue(8))


def test_the_ring_of_eight_is_as_in_the_literature() -> None:
    check_decay(Ring(), 8, 1 / 3 + 2 / 3 * 0.5**0.5)
    assert Ring().second_eigenvalue(8) == pytest.approx(0.804738, abs=5e-7)


def test_the_decay_check_catches_another_step() -> None:
    with pytest.raises(AssertionError):
        check_decay(Ring(), 8, Ring().second_eigenvalue(8), step_size=0.9)


def test_one_peer_at_a_time_averages_exactly_in_three_rounds_of_eight() -> None:
    flock = Flock(Averaging(), Exponential(one_peer=True), draws(8)).rounds(2)
    assert flock.distance > 1
    assert flock.rounds(1).distance < 1e-13


def test_who_is_not_finite_is_not_listened_to() -> None:
    xs = draws(4)
    xs[2][7] = torch.nan
    flock = Flock(Averaging(), Ring(), xs).rounds(1)
    assert [bool(x.isfinite().all()) for x in flock.xs] == [True, True, False, True]


# -- push-sum ---------------------------------------------------------------------------------------------------------


def check_push_sum(rule: MixingRule, *, raw: bool = False) -> None:
    """On a graph where nobody hears as many as it tells: all mass is kept, and ratios go to the mean."""
    xs = draws(5)
    flock = Flock(rule, Lopsided(), xs)
    mean = torch.stack(xs).mean(0)
    for _ in range(120):
        flock.round()
        masses = torch.cat([memory[MASS] for memory in flock.memories])
        given = [x * mass for x, mass in zip(flock.xs, masses, strict=True)]
        assert abs(float(masses.sum()) - 5) < 1e-14 * 5, "mass was lost"
        assert float((torch.stack(given).sum(0) / 5 - mean).abs().max()) < 1e-14, "numbers were lost"
    assert len(set(masses.tolist())) > 1, "this graph shows nothing"
    found = given if raw else flock.xs
    assert max(float((x - mean).abs().max()) for x in found) < 1e-12, "not the mean"


def test_mass_is_kept_and_ratios_go_to_the_mean() -> None:
    check_push_sum(PushSum())


def test_without_the_ratio_they_do_not() -> None:
    with pytest.raises(AssertionError, match="not the mean"):
        check_push_sum(PushSum(), raw=True)


@dataclass(frozen=True)
class Wasteful(PushSum):
    """Forgets the mass that came with the numbers."""

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, heard: Sequence[NeighborMessage]
    ) -> Tensor:
        first, *others = heard
        without: list[NeighborMessage] = [
            each._replace(payload=(each.payload[0], each.payload[1] * 0)) for each in others
        ]
        return super().land(x, layout, memory, offer, [first, *without])


def test_the_check_catches_lost_mass() -> None:
    with pytest.raises(AssertionError, match="mass was lost"):
        check_push_sum(Wasteful())


def test_steps_are_those_of_the_numerator() -> None:
    """z moved by d, so x moves by d, whatever the mass."""
    rule, x = PushSum(), draws(1)[0]
    memory = rule.begin(x)
    memory[NUMBERS].mul_(0.25)
    memory[MASS].fill_(0.25)
    numerator, mass = rule.shares(x + 1, memory)
    torch.testing.assert_close(numerator, 0.25 * x + 1, atol=1e-14, rtol=1e-14)
    assert torch.equal(rule.whole((numerator.clone(), mass)), numerator / 0.25)


@dataclass(frozen=True)
class Narrow(PushSum):
    """Keeps its numbers in the parameters' precision between rounds."""

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, heard: Sequence[NeighborMessage]
    ) -> Tensor:
        shown = super().land(x, layout, memory, offer, heard)
        memory[NUMBERS].copy_(memory[NUMBERS].to(x.dtype))
        return shown


@dataclass(frozen=True)
class Rounds(PushSum):
    """Keeps as much of its numbers as it gives to each neighbour, rounded alike."""

    def offer(self, x: FlatTensors, memory: Memory, state: State, at: AggregationContext, told: int) -> GossipOffer:
        offered = super().offer(x, memory, state, at, told)
        part, mass = offered.payload
        return replace(offered, own=(part.to(memory[NUMBERS].dtype), mass))


def check_half_precision(rule: MixingRule) -> None:
    """In bfloat16 the mean over all mass stays where it was, and everyone ends next to it."""
    xs = [x + 3 for x in draws(5, torch.bfloat16)]
    flock = Flock(rule, Lopsided(), xs)
    mean = torch.stack(xs).double().mean(0)
    for _ in range(300):
        assert all(offer.payload[0].dtype == torch.bfloat16 for offer in flock.round())
    given = [rule.shares(x, memory)[0] for x, memory in zip(flock.xs, flock.memories, strict=True)]
    found = torch.stack(given).double().mean(0)
    assert float((found - mean).norm() / mean.norm()) < 1e-6, "numbers were lost"
    assert max(float((x.double() - mean).norm() / mean.norm()) for x in flock.xs) < 2**-7, "not the mean"


def test_rounding_moves_no_mass() -> None:
    check_half_precision(PushSum())


@pytest.mark.parametrize("rule", [Narrow(), Rounds()], ids=repr)
def test_rounding_that_does_is_found(rule: MixingRule) -> None:
    with pytest.raises(AssertionError, match="numbers were lost"):
        check_half_precision(rule)


def test_who_is_not_finite_keeps_its_mass() -> None:
    flock = Flock(PushSum(), Lopsided(), draws(5)).rounds(2)
    mass = flock.memories[1][MASS].clone()
    flock.xs[1][7] = torch.nan
    flock.rounds(1)
    assert float(flock.memories[1][MASS]) >= float(mass)
    assert float(sum(memory[MASS] for memory in flock.memories)) == pytest.approx(5, abs=1e-14)
    assert [bool(x.isfinite().all()) for x in flock.xs] == [True, False, True, True, True]


def test_only_push_sum_goes_with_such_a_graph() -> None:
    PushSum().check(Lopsided(), 5, 0)
    Averaging().check(Exponential(one_peer=True), 6, 0)
    for rule in (Averaging(), Choco(Dense(), 1.0)):
        with pytest.raises(AttachError, match=r'do not sum to 1.*Write Gossip\("push-sum"\) \+ Lopsided\(\)'):
            rule.check(Lopsided(), 5, 0)
