"""Gossip round: one neighbor all-gather of a header and the messages of all parts, and applying them."""

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
    """Header of a round's message."""

    number: int  # of the round
    passes: int  # optimizer steps of this rank
    presence: Presence  # why this rank joins the round
    stop: bool  # a stop was requested on this rank

    def written(self, device: torch.device) -> Tensor:
        return torch.tensor(self, dtype=torch.float64, device=device)


def read_header(numbers: Tensor) -> RoundHeader:
    number, passes, presence, stop = map(int, numbers.tolist())
    return RoundHeader(number, passes, Presence(presence), bool(stop))


@dataclass
class MixedTensors:
    """Tensors that are mixed together: a bucket's parameters, or other averaged state."""

    rule: MixingRule
    x: FlatTensors  # a copy
    memory: Memory
    bucket: Bucket | None = None
    mixed: Tensor | None = None  # x after the neighbors' messages were applied

    def offer(self, at: AggregationContext, receivers: int) -> GossipOffer:
        state = State() if self.bucket is None else self.bucket.state
        return self.rule.offer(self.x, self.memory, state, at, receivers)

    def land(self, offer: GossipOffer, received: Sequence[NeighborMessage]) -> None:
        self.mixed = self.rule.land(self.x.flat, self.x.layout, self.memory, offer, received)
        if self.bucket is not None:
            self.bucket.state = offer.next_state.after(self.bucket.state)


@dataclass(frozen=True)
class NeighborGraph:
    """A topology as seen by `at` in one round, at.step."""

    topology: Topology
    at: AggregationContext

    @property
    def sends_to(self) -> tuple[int, ...]:
        return self.topology.sends_to(self.at.rank, self.at.world, self.at.step, self.at.seed)

    @property
    def edges(self) -> tuple[tuple[int, float], ...]:
        weights = self.topology.weights(self.at.rank, self.at.world, self.at.step, self.at.seed)
        return tuple((peer, weight) for peer, weight in weights if peer != self.at.rank)


def gossip_round(
    parts: Sequence[MixedTensors], head: RoundHeader, graph: NeighborGraph, *, all_meet: bool
) -> Generator[Any, Any, Sequence[RoundHeader]]:
    """Make a round. Returns the headers of all ranks if `all_meet`, otherwise nothing.

    Nothing is written before all messages have arrived. If the headers announce a call that needs all workers, nothing
    is mixed.
    """
    at, sends_to, edges = graph.at, graph.sends_to, graph.edges
    offers = [part.offer(at, len(sends_to)) for part in parts]
    written = head.written(parts[0].x.flat.device)
    op = NeighborAllGather((written, *chain.from_iterable(offer.payload for offer in offers)), edges, sends_to)
    everyone: Sequence[Payload] = ()
    if all_meet:
        everyone, received = yield Coalesced((AllGather((written,)), op))
    else:
        received = yield op
    check({at.rank: head} | {peer: read_header(payload[0]) for peer, payload in zip(op.senders, received, strict=True)})
    if head.presence.call is None:
        _land(parts, offers, [(weight, _of(at, peer)) for peer, weight in edges], received)
    return [read_header(remote) for (remote,) in everyone]


def check(heads: Mapping[int, RoundHeader]) -> None:
    """Raise LoopError unless a rank and its neighbors are in the same round and make the same call."""
    waiting = {rank: head.presence.call for rank, head in sorted(heads.items()) if head.presence.call is not None}
    if waiting and len({(head.presence, head.passes) for head in heads.values()}) > 1:
        merging = "session.averaged_parameters()"
        calls = ", ".join(f"rank {rank} called {call}" for rank, call in waiting.items())
        raise LoopError(
            f"{calls.replace(merging, f'{merging} or session.close()')} while other ranks were elsewhere in their "
            "training. With Gossip this call needs all workers, after the same number of steps. "
            "Call it on every rank; where ranks have different numbers of batches, write `with session.epoch():` "
            "around the loop over batches and call it after that."
        )
    if len({head.number for head in heads.values()}) > 1:
        numbers = ", ".join(f"rank {rank} in {head.number}" for rank, head in sorted(heads.items()))
        raise LoopError(
            f"neighbours are in different rounds ({numbers}) and would mix parameters of different steps. Load the "
            "same checkpoint on every rank: session.load(directory)."
        )


def _of(at: AggregationContext, rank: int) -> AggregationContext:
    return AggregationContext(step=at.step, seed=at.seed, rank=rank, world=at.world)


def _land(
    parts: Sequence[MixedTensors],
    offers: Sequence[GossipOffer],
    edges: Sequence[tuple[float, AggregationContext]],
    received: Sequence[Payload],
) -> None:
    """Pass each part its slice of every payload, after the header."""
    begin = 1
    for part, offer in zip(parts, offers, strict=True):
        end = begin + len(offer.payload)
        remote = zip(edges, received, strict=True)
        part.land(offer, [NeighborMessage(weight, payload[begin:end], at) for (weight, at), payload in remote])
        begin = end
