"""Gossip round: one neighbor all-gather of a header and each part's message, and its landing."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.gossip.rules import GossipOffer, MixingRule, NeighborMessage
from gossamer.algorithms.strategies import Memory
from gossamer.algorithms.topologies import Topology
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import AllGather, Coalesced, NeighborAllGather, Payload
from gossamer.errors import LoopError
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.report import Presence

HEADER_BYTES = 32


class RoundHeader(NamedTuple):
    """Goes before the numbers of a round."""

    number: int  # of the round
    passes: int  # steps of this rank's optimizer
    presence: Presence  # why it takes part
    stop: bool  # it was asked to end the run

    def written(self, device: torch.device) -> Tensor:
        return torch.tensor(self, dtype=torch.float64, device=device)


def read_header(numbers: Tensor) -> RoundHeader:
    number, passes, presence, stop = map(int, numbers.tolist())
    return RoundHeader(number, passes, Presence(presence), bool(stop))


@dataclass
class MixedTensors:
    """Numbers that are mixed side by side: a bucket's parameters, or state averaged along."""

    rule: MixingRule
    x: FlatTensors  # a copy
    memory: Memory
    bucket: Bucket | None = None
    mixed: Tensor | None = None  # what x became, once the neighbors were heard

    def offer(self, at: AggregationContext, told: int) -> GossipOffer:
        state = State() if self.bucket is None else self.bucket.state
        return self.rule.offer(self.x, self.memory, state, at, told)

    def land(self, offer: GossipOffer, heard: Sequence[NeighborMessage]) -> None:
        self.mixed = self.rule.land(self.x.flat, self.x.layout, self.memory, offer, heard)
        if self.bucket is not None:
            self.bucket.state = offer.next_state.after(self.bucket.state)


@dataclass(frozen=True)
class NeighborGraph:
    """A topology as `at` sees it in one round, which is at.step."""

    topology: Topology
    at: AggregationContext

    @property
    def tells(self) -> tuple[int, ...]:
        return self.topology.tells(self.at.rank, self.at.world, self.at.step, self.at.seed)

    @property
    def edges(self) -> tuple[tuple[int, float], ...]:
        weights = self.topology.weights(self.at.rank, self.at.world, self.at.step, self.at.seed)
        return tuple((peer, weight) for peer, weight in weights if peer != self.at.rank)


def gossip_round(
    parts: Sequence[MixedTensors], head: RoundHeader, graph: NeighborGraph, *, all_meet: bool
) -> Generator[Any, Any, Sequence[RoundHeader]]:
    """Make a round; all ranks' headers where all meet in it, else none. Nothing is written before all were heard.

    Where the header says that this rank waits to save, and so do its neighbors, nothing is mixed.
    """
    at, tells, edges = graph.at, graph.tells, graph.edges
    offers = [part.offer(at, len(tells)) for part in parts]
    written = head.written(parts[0].x.flat.device)
    op = NeighborAllGather((written, *chain.from_iterable(offer.payload for offer in offers)), edges, tells)
    everyone: Sequence[Payload] = ()
    if all_meet:
        everyone, heard = yield Coalesced((AllGather((written,)), op))
    else:
        heard = yield op
    check({at.rank: head} | {peer: read_header(payload[0]) for peer, payload in zip(op.hears, heard, strict=True)})
    if head.presence.call is None:
        _land(parts, offers, [(weight, _of(at, peer)) for peer, weight in edges], heard)
    return [read_header(theirs) for (theirs,) in everyone]


def check(heads: Mapping[int, RoundHeader]) -> None:
    """Raise LoopError unless a rank and its neighbors, by rank, are at the same place."""
    waiting = {rank: head.presence.call for rank, head in sorted(heads.items()) if head.presence.call is not None}
    if waiting and len({(head.presence, head.passes) for head in heads.values()}) > 1:
        merging = "session.averaged_parameters()"
        calls = ", ".join(f"rank {rank} called {call}" for rank, call in waiting.items())
        raise LoopError(
            f"{calls.replace(merging, f'{merging} or session.close()')} while other ranks were elsewhere in their "
            "training. With Gossip this call needs all workers, after equally many steps. "
            "Call it on every rank; where ranks have different numbers of batches, write `with session.epoch():` "
            "around the loop over batches and call it after that."
        )
    if len({head.number for head in heads.values()}) > 1:
        numbers = ", ".join(f"rank {rank} in {head.number}" for rank, head in sorted(heads.items()))
        raise LoopError(
            f"neighbours are in different rounds ({numbers}), and would mix what does not belong together. Load the "
            "same checkpoint on every rank: session.load(directory)."
        )


def _of(at: AggregationContext, rank: int) -> AggregationContext:
    return AggregationContext(step=at.step, seed=at.seed, rank=rank, world=at.world)


def _land(
    parts: Sequence[MixedTensors],
    offers: Sequence[GossipOffer],
    edges: Sequence[tuple[float, AggregationContext]],
    heard: Sequence[Payload],
) -> None:
    """Give each part its share of every payload, after the header."""
    begin = 1
    for part, offer in zip(parts, offers, strict=True):
        end = begin + len(offer.payload)
        theirs = zip(edges, heard, strict=True)
        part.land(offer, [NeighborMessage(weight, payload[begin:end], at) for (weight, at), payload in theirs])
        begin = end
