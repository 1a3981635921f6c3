"""Gossip rounds of workers in one thread, without sessions, and a graph on which nobody hears as many as it tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Dense, point_to_point
from gossamer.algorithms.gossip.rules import GossipOffer, Memory, MixingRule, NeighborMessage
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.topologies import Topology
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import simulate
from gossamer.train.synchronizers.gossip_round import MixedTensors, renewed

LAYOUT = Layout.of({"weight": (24, 32), "bias": (32,)})


@dataclass(frozen=True, repr=False)
class Lopsided(Topology):
    """Rank r tells all that follow it but one, and the last two tell the first: nobody hears as many as it tells."""

    @property
    def mutual(self) -> bool:
        return False

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:  # noqa: A002
        ahead = tuple(peer for peer in range(rank + 1, world) if peer != rank + 2)
        return ahead if rank < world - 2 else (0, *ahead)

    def receives_from(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:  # noqa: A002
        return tuple(peer for peer in range(world) if rank in self.sends_to(peer, world, round, seed))


class Flock:
    """Workers that mix in this thread. xs: what each has, (n,)."""

    def __init__(self, rule: MixingRule, topology: Topology, xs: Sequence[Tensor], layout: Layout = LAYOUT) -> None:
        self.rule, self.topology, self.layout, self.number = rule, topology, layout, 0
        self.xs, self.world = [x.clone() for x in xs], len(xs)
        blank = torch.zeros_like(xs[0])
        self.memories: list[Memory] = [rule.begin(blank) for _ in xs]
        self.states = [self._begun(rank) for rank in range(self.world)]

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

    def change(self, stay: Sequence[int], newcomers: int = 0) -> Flock:
        """Continue with the workers `stay`, by their ranks so far, and newcomers that have copied the first of them."""
        first = self.xs[stay[0]]
        parts = [MixedTensors(self.rule, FlatTensors(self.xs[rank], self.layout), self.memories[rank]) for rank in stay]
        parts += [
            MixedTensors(self.rule, FlatTensors(first.clone(), self.layout), self.rule.begin(first))
            for _ in range(newcomers)
        ]
        world = len(parts)
        renewals = simulate(
            [renewed([part], world, joined=newcomers > 0, new=rank >= len(stay)) for rank, part in enumerate(parts)]
        )
        self.xs, self.memories = map(list, zip(*((part.x.flat, part.memory) for (part,) in renewals), strict=True))
        self.states = [*(self.states[rank] for rank in stay), *(self._begun(len(stay) + n) for n in range(newcomers))]
        self.world = world
        return self

    def _begun(self, rank: int) -> State:
        compressor = getattr(self.rule, "compressor", Dense())
        return point_to_point.begin(compressor, FlatTensors(torch.zeros_like(self.xs[0]), self.layout), self.at(rank))

    def told(self, where: tuple[int, int, int, int]) -> int:
        return len(self.topology.sends_to(*where))

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


def compressor_of(text: str) -> Any:
    return resolve(parse(f"Gossip(step_size=0.1) + Ring() + {text}"), 4).compressor
