"""Rules of gossip averaging: plain averaging and push-sum, on small graphs and without sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support.gossip_rounds import LAYOUT, Flock, Lopsided, compressor_of, draws
from torch import Tensor

from gossamer.algorithms.compressors import Dense, point_to_point
from gossamer.algorithms.gossip.rules import (
    HAT,
    MASS,
    NUMBERS,
    PULL,
    Averaging,
    Choco,
    GossipOffer,
    Memory,
    MixingRule,
    NeighborMessage,
    PushSum,
)
from gossamer.algorithms.strategies.gossip import safe_step_size
from gossamer.algorithms.topologies import Complete, Exponential, Hierarchy, RandomPeers, Ring, Topology, Torus
from gossamer.base import rng
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


def test_a_rank_that_is_not_finite_is_not_listened_to() -> None:
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


def test_a_rank_that_is_not_finite_keeps_its_mass() -> None:
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


# -- equal copies at every neighbor, and consensus ---------------------------------------------------------------------


RING = Ring()


def check_choco_is_averaging(step_size: float) -> None:
    """With steps in between: what an optimizer does is mixed as well."""
    ours = Flock(Choco(Dense(), step_size), Torus(), draws(6))
    theirs = Flock(Averaging(), Torus(), draws(6))
    for number in range(20):
        for rank in range(6):
            step = torch.randn(LAYOUT.numel, generator=rng.generator("steps", rank, number), dtype=torch.float64)
            ours.xs[rank] = ours.xs[rank] + step
            theirs.xs[rank] = theirs.xs[rank] + step
        ours.round()
        theirs.round()
        for one, other in zip(ours.xs, theirs.xs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_with_all_of_every_difference_it_is_plain_averaging() -> None:
    check_choco_is_averaging(1.0)


def test_the_check_catches_a_shorter_step() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_choco_is_averaging(0.99)


COMPRESSORS = [
    "TopK(density=0.05)",
    "RandomK(density=0.1)",
    "Threshold(value=0.5)",
    "OneBit()",
    "TwoBit(threshold=0.5)",
    "Int8()",
    "QSGD(levels=127)",
    "Float4()",
    "SignMagnitude()",
    "PowerSGD(rank=2)",
    "Dense(dtype='bfloat16')",
    "Chain(TopK(density=0.1), Int8())",
]


def check_copies(
    text: str,
    dtype: torch.dtype,
    mishear: Callable[[AggregationContext], AggregationContext] = lambda at: at,
    topology: Topology = RING,
) -> None:
    """A listener that keeps a copy of everyone by what it hears has the writers' own bits; and nothing moves in sum."""
    compressor = compressor_of(text)
    xs = draws(4, dtype)
    flock = Flock(Choco(compressor, 0.1), topology, xs)
    copies, letter = [torch.zeros(LAYOUT.numel, dtype=dtype) for _ in xs], torch.empty(LAYOUT.numel, dtype=dtype)
    for _ in range(4):
        where = [flock.at(rank) for rank in range(4)]
        for rank, offer in enumerate(flock.round()):
            payload = tuple(part.clone() for part in offer.payload)
            point_to_point.decode(compressor, payload, LAYOUT, mishear(where[rank]), letter)
            copies[rank].add_(letter)
            assert torch.equal(copies[rank], flock.memories[rank][HAT]), "the copies differ"
    pulls = torch.stack([memory[PULL] for memory in flock.memories]).sum(0)
    assert float(pulls.abs().max()) < (1e-12 if dtype == torch.float64 else 1e-4)
    moved = flock.mean - torch.stack(xs).mean(0)
    assert float(moved.abs().max()) < (1e-13 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("text", COMPRESSORS)
def test_every_copy_has_the_same_bits(text: str) -> None:
    check_copies(text, torch.float32)


def test_every_copy_has_the_same_bits_also_of_wider_numbers() -> None:
    check_copies("TopK(density=0.1)", torch.float64)
    check_copies("TopK(density=0.1)", torch.float64, topology=Exponential())


def test_the_copy_check_catches_who_takes_one_worker_for_another() -> None:
    with pytest.raises(AssertionError, match="the copies differ"):
        check_copies("RandomK(density=0.1)", torch.float32, lambda at: replace(at, rank=0))


@dataclass(frozen=True)
class Naive(Choco):
    """Compresses the parameters themselves, and remembers nothing."""

    def offer(self, x: FlatTensors, memory: Memory, state: State, at: AggregationContext, told: int) -> GossipOffer:
        letter = point_to_point.encode(self.compressor, x, state, at)
        return GossipOffer(letter.payload, (letter.own(),), letter.next_state)

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, heard: Sequence[NeighborMessage]
    ) -> Tensor:
        fresh = {HAT: torch.zeros_like(x), PULL: torch.zeros_like(x)}
        return super().land(x, layout, fresh, offer, heard)


def check_consensus(kind: type[Choco], text: str) -> None:
    compressor = compressor_of(text)
    flock = Flock(kind(compressor, safe_step_size(compressor)), Ring(), draws(3))
    begin = flock.distance
    assert flock.rounds(25).distance < 1e-3 * begin, "no consensus"


@pytest.mark.parametrize("text", ["TopK(density=0.3)", "Float4()"])
def test_differences_to_copies_reach_consensus(text: str) -> None:
    check_consensus(Choco, text)


@pytest.mark.parametrize("text", ["TopK(density=0.3)", "Float4()"])
def test_parameters_that_are_compressed_as_they_are_do_not(text: str) -> None:
    with pytest.raises(AssertionError, match="no consensus"):
        check_consensus(Naive, text)


def test_a_rank_that_is_not_finite_says_that_nothing_changed() -> None:
    xs = draws(4)
    flock = Flock(Choco(compressor_of("Int8()"), 0.5), Ring(), xs).rounds(1)
    before = flock.memories[2][HAT].clone()
    flock.xs[2][7] = torch.inf
    flock.rounds(1)
    assert torch.equal(flock.memories[2][HAT], before)
    assert [bool(x.isfinite().all()) for x in flock.xs] == [True, True, False, True]
