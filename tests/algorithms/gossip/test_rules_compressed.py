"""Gossip averaging with a compressor (CHOCO): equal copies at every neighbor, and consensus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support.gossip_rounds import LAYOUT, Flock, compressor_of, draws
from torch import Tensor

from gossamer.algorithms.compressors import Dense, point_to_point
from gossamer.algorithms.gossip.rules import HAT, PULL, Averaging, Choco, GossipOffer, Memory, NeighborMessage
from gossamer.algorithms.strategies.gossip import safe_step_size
from gossamer.algorithms.topologies import Exponential, Ring, Topology, Torus
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout

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


def test_who_is_not_finite_says_that_nothing_changed() -> None:
    xs = draws(4)
    flock = Flock(Choco(compressor_of("Int8()"), 0.5), Ring(), xs).rounds(1)
    before = flock.memories[2][HAT].clone()
    flock.xs[2][7] = torch.inf
    flock.rounds(1)
    assert torch.equal(flock.memories[2][HAT], before)
    assert [bool(x.isfinite().all()) for x in flock.xs] == [True, True, False, True]
