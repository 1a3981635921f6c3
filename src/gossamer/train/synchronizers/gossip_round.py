"""Gossip round: one neighbor all-gather of a header and the messages of all parts, and applying them; the state after
workers have joined or were lost."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.gossip.rules import GossipOffer, MixingRule, NeighborMessage
from gossamer.algorithms.strategies import Memory
from gossamer.algorithms.topologies import Topology
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import all_finite
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced, NeighborAllGather, Payload
from gossamer.errors import LoopError, NonFiniteError
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.step_decision import Presence

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
    parts: Sequence[MixedTensors], head: RoundHeader, graph: NeighborGraph, *, all_meet: bool, atomic: bool = False
) -> Generator[Any, Any, Sequence[RoundHeader]]:
    """Make a round. Returns the headers of all ranks if `all_meet` or `atomic`, otherwise nothing.

    Nothing is written before all messages have arrived. If the headers announce a call that needs all workers, nothing
    is mixed.

    Args:
        all_meet: exchange the headers of all ranks together with the messages.
        atomic: gather the headers of all ranks after the messages. A rank that has them knows that every rank has its
            messages, so in an elastic run the round counts for all ranks or for none.
    """
    at, sends_to, edges = graph.at, graph.sends_to, graph.edges
    offers = [part.offer(at, len(sends_to)) for part in parts]
    written = head.written(parts[0].x.flat.device)
    op = NeighborAllGather((written, *chain.from_iterable(offer.payload for offer in offers)), edges, sends_to)
    all_headers: Sequence[Payload] = ()
    if atomic:
        received = yield op
        all_headers = yield AllGather((written,))
    elif all_meet:
        all_headers, received = yield Coalesced((AllGather((written,)), op))
    else:
        received = yield op
    heads = [read_header(remote) for (remote,) in all_headers]
    neighbors = {peer: read_header(payload[0]) for peer, payload in zip(op.senders, received, strict=True)}
    check(dict(enumerate(heads)) if atomic else {at.rank: head} | neighbors)
    if head.presence.call is None:
        _land(parts, offers, [(weight, _of(at, peer)) for peer, weight in edges], received)
    return heads


def renewed(
    parts: Sequence[MixedTensors], world: int, *, joined: bool, new: bool
) -> Generator[Any, Any, list[MixedTensors]]:
    """Return the parts with which a rank continues after workers have joined or were lost. Nothing is written.

    A worker that stays keeps its values. A worker that joins starts from the means over those that stay, so the means
    over all workers do not change. Copies of other workers' values start again from the mean, which all ranks have.

    Args:
        world: number of ranks.
        joined: whether any worker has joined; equal on every rank.
        new: whether this worker has joined.
    """
    following: list[MixedTensors] = []
    for part in parts:
        if not (joined or part.rule.keeps_copies):
            following.append(part)
            continue
        x, memory = part.rule.begin_from((yield from _mean_state(part, world, new=new)), part.x.flat.dtype)
        if new:
            following.append(replace(part, x=FlatTensors(x, part.x.layout), memory=memory))
        else:
            following.append(replace(part, memory=memory) if part.rule.keeps_copies else part)
    return following


def _mean_state(part: MixedTensors, world: int, *, new: bool) -> Generator[Any, Any, Payload]:
    """The means of a part's state over the workers that stay and have finite values; in float32 or wider."""
    joint = [each.to(accumulation_dtype(each.dtype), copy=True) for each in part.rule.joint(part.x.flat, part.memory)]
    counts = not new and all(map(all_finite, joint))
    if not counts:
        for each in joint:
            each.zero_()
    weight = torch.full((1,), float(counts), dtype=torch.float64, device=part.x.flat.device)
    *means, share = yield Coalesced(tuple(AllReduceMean(each, out=each) for each in (*joint, weight)))
    counted = round(share.item() * world)
    if not counted:
        raise NonFiniteError(
            "no worker has finite parameters after the workers have changed, so training cannot continue. Restart from "
            "the last checkpoint, with a lower learning rate."
        )
    return tuple(means) if counted == world else tuple(mean.mul_(world).div_(counted) for mean in means)


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
