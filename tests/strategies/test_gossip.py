"""How neighbours average: the identities of each rule, on small graphs and without sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.compressors import Dense, point_to_point
from gossamer.core import rng
from gossamer.core.aggregation import AggregationContext, State
from gossamer.core.layout import FlatTensors, Layout
from gossamer.core.ops import NeighborAllGather, Payload
from gossamer.errors import AttachError, MismatchError, RecipeError
from gossamer.gossip.rules import (
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
from gossamer.recipes.parser import parse
from gossamer.recipes.recipe import resolve
from gossamer.runtime.runner import simulate
from gossamer.strategies import Gossip
from gossamer.strategies.gossip import kept_share, safe_step_size
from gossamer.topologies import Complete, Exponential, Hierarchy, RandomPeers, Ring, Topology, Torus

RING = Ring()
LAYOUT = Layout.of({"weight": (24, 32), "bias": (32,)})
TOPOLOGIES = [Complete(), Ring(), Torus(), Exponential(), Exponential(one_peer=True), Hierarchy(3), RandomPeers()]


@dataclass(frozen=True, repr=False)
class Lopsided(Topology):
    """Rank r tells all that follow it but one, and the last two tell the first: nobody hears as many as it tells."""

    @property
    def mutual(self) -> bool:
        return False

    def tells(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:  # noqa: A002
        ahead = tuple(peer for peer in range(rank + 1, world) if peer != rank + 2)
        return ahead if rank < world - 2 else (0, *ahead)

    def hears(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:  # noqa: A002
        return tuple(peer for peer in range(world) if rank in self.tells(peer, world, round, seed))


class Flock:
    """Workers that mix in this thread. xs: what each has, (n,)."""

    def __init__(self, rule: MixingRule, topology: Topology, xs: Sequence[Tensor], layout: Layout = LAYOUT) -> None:
        self.rule, self.topology, self.layout, self.number = rule, topology, layout, 0
        self.xs, self.world = [x.clone() for x in xs], len(xs)
        blank = torch.zeros_like(xs[0])
        self.memories: list[Memory] = [rule.begin(blank) for _ in xs]
        compressor = getattr(rule, "compressor", Dense())
        self.states = [
            point_to_point.begin(compressor, FlatTensors(blank, layout), self.at(rank)) for rank in range(self.world)
        ]

    def at(self, rank: int) -> AggregationContext:
        return AggregationContext(step=self.number, seed=5, rank=rank, world=self.world)

    def round(self) -> list[GossipOffer]:
        where = [(rank, self.world, self.number, 5) for rank in range(self.world)]
        offers = [
            self.rule.offer(
                FlatTensors(self.xs[r], self.layout), self.memories[r], self.states[r], self.at(r), self.told(where[r])
            )
            for r in range(self.world)
        ]
        heard = [
            [NeighborMessage(w, offers[j].payload, self.at(j)) for j, w in self.topology.weights(*where[r]) if j != r]
            for r in range(self.world)
        ]
        self.xs = [
            self.rule.land(self.xs[r], self.layout, self.memories[r], offers[r], heard[r]) for r in range(self.world)
        ]
        self.states = [offer.next_state.after(state) for offer, state in zip(offers, self.states, strict=True)]
        self.number += 1
        return offers

    def told(self, where: tuple[int, int, int, int]) -> int:
        return len(self.topology.tells(*where))

    def rounds(self, count: int) -> Flock:
        for _ in range(count):
            self.round()
        return self

    @property
    def mean(self) -> Tensor:
        return torch.stack(self.xs).mean(0)

    @property
    def distance(self) -> float:
        return float((torch.stack(self.xs) - self.mean).square().sum().sqrt())


def draws(world: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(LAYOUT.numel, generator=rng.generator("draws", rank), dtype=dtype) for rank in range(world)]


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


# -- with a compressor ------------------------------------------------------------------------------------------------


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


def compressor_of(text: str) -> Any:
    return resolve(parse(f"Gossip(step_size=0.1) + Ring() + {text}"), 4).compressor


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


def test_who_is_not_finite_says_that_nothing_changed() -> None:
    xs = draws(4)
    flock = Flock(Choco(compressor_of("Int8()"), 0.5), Ring(), xs).rounds(1)
    before = flock.memories[2][HAT].clone()
    flock.xs[2][7] = torch.inf
    flock.rounds(1)
    assert torch.equal(flock.memories[2][HAT], before)
    assert [bool(x.isfinite().all()) for x in flock.xs] == [True, True, False, True]


def test_the_step_follows_what_a_letter_holds() -> None:
    found = {text: safe_step_size(compressor_of(text)) for text in ("Int8()", "TopK(density=0.1)", "OneBit()")}
    assert found == {"Int8()": 0.5, "TopK(density=0.1)": 0.22, "OneBit()": 0.32}
    assert Gossip(step_size=0.07).rule(compressor_of("Int8()")) == Choco(compressor_of("Int8()"), 0.07)
    assert kept_share(compressor_of("Dense(dtype='bfloat16')")) > 0.999


@pytest.mark.parametrize("text", ["Warmup(TopK(density=0.1), steps=5)", "Route(TopK(density=0.1), smallest=10000)"])
def test_the_step_is_that_of_what_is_sent_in_the_end(text: str) -> None:
    assert safe_step_size(compressor_of(text)) == safe_step_size(compressor_of("TopK(density=0.1)"))


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
        with pytest.raises(AttachError, match=r'hears more or less.*Write Gossip\("push-sum"\) \+ Lopsided\(\)'):
            rule.check(Lopsided(), 5, 0)


# -- the term ---------------------------------------------------------------------------------------------------------


def test_terms_choose_their_rule() -> None:
    assert Gossip().rule(Dense()) == Averaging()
    assert Gossip(step_size=0.5).rule(Dense()) == Averaging(0.5)
    assert Gossip("push-sum").rule(Dense()) == PushSum()
    assert Gossip().rule(Dense(dtype="bfloat16")) == Choco(Dense(dtype="bfloat16"), 0.5)


def test_all_meet_about_every_world_passes() -> None:
    assert [Gossip(period=period).rounds_apart(8) for period in (1, 2, 3, 8, 100)] == [8, 4, 3, 1, 1]


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("Gossip()", "Gossip() + Dense() + Complete()"),
        (
            "Gossip('push-sum', period=2) + Exponential()",
            "Gossip(mixing='push-sum', period=2) + Dense() + Exponential()",
        ),
        ("Gossip() + TopK(0.01) + Ring()", "Gossip() + Route(TopK(density=0.01)) + Ring()"),
        ("Gossip() + Int8()", "Gossip() + Route(Int8()) + Complete()"),
        ("Gossip('pairwise') + RandomPeers()", "Gossip(mixing='pairwise') + Dense() + RandomPeers()"),
    ],
)
def test_recipes_add_no_second_memory(text: str, resolved: str) -> None:
    found = resolve(text, 8)
    assert repr(found) == resolved
    assert resolve(found, 8) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Gossip() + Feedback(TopK(0.01))", r"Feedback would send it twice.*Write Gossip\(\) \+ TopK"),
        ("Gossip() + Route(Sharded(Int8()))", r"no group to divide among"),
        ("Gossip('push-sum') + Int8()", r'Write Gossip\("push-sum"\) \+ Dense\(\), or Gossip\(\) with a compressor'),
        ("Gossip() + Int8() + RandomPeers()", r"neighbours of RandomPeers\(\) change"),
        ("Gossip() + Int8() + Exponential(one_peer=True)", r"every neighbour must hear every letter"),
        ("Gossip() + TernGrad()", r"copies would run away"),
        ("Gossip() + DGC(0.01)", r"applies the optimizer's momentum"),
        ("Gossip('pairwise') + Warmup(TopK(0.01), steps=5)", "workers never agree"),
        ("Gossip('pairwise') + Route(TopK(0.01), smallest=10000)", "workers never agree"),
        ("Gossip() + Warmup(TernGrad(), steps=5)", "copies would run away"),
        ("Gossip('pull-sum')", r'"symmetric", "push-sum" or "pairwise"'),
        ("Gossip(period=0)", r"1 or more, not 0"),
        ("Gossip(step_size=1.5)", r"in \(0, 1\], not 1.5"),
        ("Gossip('push-sum', step_size=0.5)", r'write Gossip\("push-sum"\), or Gossip\(step_size=0.5\)'),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(text, 8)


# -- the word ---------------------------------------------------------------------------------------------------------


def say(payload: Payload, edges: tuple[tuple[int, float], ...], tells: tuple[int, ...] | None) -> Any:
    return (yield NeighborAllGather(payload, edges, tells))


def test_edges_may_go_one_way() -> None:
    ones = [torch.full((3,), float(rank)) for rank in range(3)]
    scripts = [say((ones[r],), (((r - 1) % 3, 0.5), (r, 0.5)), ((r + 1) % 3,)) for r in range(3)]
    heard = simulate(scripts)
    assert [[int(tensor[0]) for (tensor,) in each] for each in heard] == [[2, 0], [0, 1], [1, 2]]
    assert NeighborAllGather((ones[0],), ((2, 0.5), (0, 0.5)), (1,)).bytes_sent(3, 0) == 12
    assert NeighborAllGather((ones[0],), ((2, 0.5), (1, 0.5), (0, 0.5))).bytes_sent(3, 0) == 24


def test_edges_with_one_end_are_refused() -> None:
    one = (torch.zeros(1),)
    with pytest.raises(MismatchError, match=r"only one end.*0 to 1"):
        simulate([say(one, (), (1,)), say(one, (), ())])
