"""Operation costs: time of collective operations on a network, as an engine or tables of hops cut them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from gossamer.algorithms.collectives import Broadcast, Collective, HubAllGather, HubBroadcast
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    payload_bytes,
)
from gossamer.comm.network.cost.cheapest_collective import (
    SUMMED_BYTES,
    RequestedCollective,
    broadcasting_hub,
    chosen_collective,
    chosen_on_uniform_links,
    gathering_hub,
    is_alike,
)
from gossamer.comm.network.cost.message_schedule import (
    Collect,
    Moves,
    Receive,
    Send,
    direct,
    eager_direct,
    eager_neighbors,
    neighbors,
    ring_mean,
    sized_table_moves,
    table_moves,
    tree_broadcast,
)
from gossamer.comm.network.cost.message_simulator import Wires
from gossamer.comm.network.cost.representative_cost import RepresentativeCost, UniformNetwork
from gossamer.comm.network.model import Network
from gossamer.comm.network.parse import NetworkError
from gossamer.comm.network.tcp_model import ETHERNET, Tcp

MOST_UNLIKE = 256  # largest number of ranks for which all messages are simulated
SMALL_BYTES = 2**20  # largest mean for which the engine uses a direct exchange

Chosen = RequestedCollective  # or "engine"
DEFAULT: Chosen = "auto"


class MessagePlan(Protocol):
    """How operations are cut into messages."""

    def mean(self, rank: int, world: int, numel: int, itemsize: int) -> list[Moves]: ...

    def straight(self, rank: int, world: int, nbytes: Sequence[int]) -> Moves:
        """Send nbytes[j] to rank j."""

    def gather(self, rank: int, world: int, sizes: Sequence[int]) -> list[Moves]:
        """Send the sizes[rank] bytes of this rank to all."""

    def neighbors(self, rank: int, receivers: Sequence[int], senders: Sequence[int], nbytes: int) -> Moves: ...

    def broadcast(self, rank: int, world: int, nbytes: int, source: int) -> list[Moves]: ...

    def among(self, ranks: Sequence[int]) -> MessagePlan:
        """Return the plan for a subgroup."""


class Engine:
    """As ProcessGroupTransport uses Gloo: messages wait for their receivers, and large means use a ring."""

    def mean(self, rank: int, world: int, numel: int, itemsize: int) -> list[Moves]:
        if itemsize < SUMMED_BYTES or numel * itemsize <= SMALL_BYTES:
            return [self._direct_mean(rank, world, numel, itemsize)]
        return [ring_mean(rank, world, numel * itemsize, itemsize)]

    def _direct_mean(self, rank: int, world: int, numel: int, itemsize: int) -> Moves:
        """Send each part to its owner, and each owner's sum to all ranks."""
        sizes = [(numel // world + (owner < numel % world)) * itemsize for owner in range(world)]
        yield from direct(rank, world, sizes)
        yield from direct(rank, world, [sizes[rank]] * world)

    def straight(self, rank: int, world: int, nbytes: Sequence[int]) -> Moves:
        return direct(rank, world, nbytes)

    def gather(self, rank: int, world: int, sizes: Sequence[int]) -> list[Moves]:
        return [direct(rank, world, [sizes[rank]] * world)]

    def neighbors(self, rank: int, receivers: Sequence[int], senders: Sequence[int], nbytes: int) -> Moves:
        return neighbors(rank, receivers, senders, nbytes)

    def broadcast(self, rank: int, world: int, nbytes: int, source: int) -> list[Moves]:
        return [tree_broadcast(rank, world, nbytes, source)]

    def among(self, ranks: Sequence[int]) -> MessagePlan:
        return self


@dataclass(frozen=True)
class Eager:
    """Operations by a table of hops or in one hop; messages leave at once.

    choose: the table that sums a tensor of (bytes, itemsize) in a group of these ranks.
    network: of these ranks.
    """

    choose: Callable[[int, int, Sequence[int]], Collective]
    ranks: Sequence[int]
    network: Network

    def mean(self, rank: int, world: int, numel: int, itemsize: int) -> list[Moves]:
        collective = self.choose(numel * itemsize, itemsize, self.ranks)
        return table_moves(collective, rank, world, numel, itemsize)

    def straight(self, rank: int, world: int, nbytes: Sequence[int]) -> Moves:
        return eager_direct(rank, world, nbytes)

    def gather(self, rank: int, world: int, sizes: Sequence[int]) -> list[Moves]:
        hub = gathering_hub(sizes, self.network)
        if hub is None:
            return [eager_direct(rank, world, [sizes[rank]] * world)]
        return sized_table_moves(HubAllGather(hub=hub), rank, world, sizes)

    def neighbors(self, rank: int, receivers: Sequence[int], senders: Sequence[int], nbytes: int) -> Moves:
        return eager_neighbors(rank, receivers, senders, nbytes)

    def broadcast(self, rank: int, world: int, nbytes: int, source: int) -> list[Moves]:
        hub = broadcasting_hub(nbytes, source, self.network)
        table = Broadcast(source=source) if hub is None else HubBroadcast(source=source, hub=hub)
        return table_moves(table, rank, world, nbytes, 1)

    def among(self, ranks: Sequence[int]) -> MessagePlan:
        return replace(self, ranks=[self.ranks[rank] for rank in ranks], network=self.network.among(ranks))


ENGINE = Engine()


def message_plan(collective: Chosen, network: Network, tcp: Tcp = ETHERNET) -> MessagePlan:
    """Return the plan: Gloo's for "engine"; else eager, with a fixed algorithm or the requested one per mean."""

    def choose(nbytes: int, itemsize: int, ranks: Sequence[int]) -> Collective:
        return chosen_collective(collective, nbytes, itemsize, network.among(ranks), tcp)

    return ENGINE if collective == "engine" else Eager(choose, range(len(network.hosts)), network)


def parts_of(op: CollectiveOp, rank: int, world: int, way: MessagePlan = ENGINE) -> list[Moves]:
    """Return one rank's part in an operation: concurrent exchanges."""
    match op:
        case AllReduceMean(tensor):
            return way.mean(rank, world, tensor.numel(), tensor.element_size())
        case AllToAll(forms=tuple(forms)):
            return [way.straight(rank, world, [payload_bytes(forms[rank])] * world)]
        case AllGather(payload, forms):
            sizes = [payload_bytes(payload)] * world if forms is None else list(map(payload_bytes, forms))
            return way.gather(rank, world, sizes)
        case AllToAll(parts):
            return [way.straight(rank, world, [payload_bytes(part) for part in parts])]
        case NeighborAllGather(payload):
            return [way.neighbors(rank, op.receivers, op.senders, payload_bytes(payload))]
        case InGroup(_, inner):
            ranks = op.group_of(rank, world)
            own = parts_of(inner, ranks.index(rank), len(ranks), way.among(ranks))
            return [_renamed(moves, ranks) for moves in own]
        case Coalesced(ops):
            return [moves for each in ops for moves in parts_of(each, rank, world, way)]


def _renamed(moves: Moves, ranks: Sequence[int]) -> Moves:
    """Renumber a group's moves: its rank r is ranks[r] of the whole group."""
    for move in moves:
        match move:
            case Send(to):
                yield replace(move, to=ranks[to])
            case Receive(of) | Collect(of):
                yield replace(move, of=ranks[of])
            case _:
                yield move


def seconds(op: CollectiveOp, network: Network, tcp: Tcp = ETHERNET, collective: Chosen = DEFAULT) -> float:
    """Return the time of an operation that all ranks begin at once, over idle connections."""
    world = len(network.hosts)
    return max(NetworkCost(network, tcp, collective).answer([op] * world, [0.0] * world))


def op_costs(network: Network, tcp: Tcp = ETHERNET, collective: Chosen = DEFAULT) -> NetworkCost | RepresentativeCost:
    """Return the costs of operations that all ranks begin equally: from the messages of all ranks, or of one.

    Raises NetworkError if the ranks are unequal and too many to simulate all of their messages.
    """
    if is_alike(network) and collective != "engine":
        return representative_cost(network, tcp, collective)
    if len(network.hosts) > MOST_UNLIKE:
        what = "the engine's collectives" if network.is_uniform else "networks of unequal hosts"
        raise NetworkError(
            f"estimates for {what} simulate all workers' messages, which takes minutes for {MOST_UNLIKE} workers "
            f"and hours for {len(network.hosts):,}. Use a network of equal hosts, such as 1gbit,1ms, and one of "
            "Gossamer's own collectives, or fewer workers."
        )
    return NetworkCost(network, tcp, collective)


def representative_cost(network: Network, tcp: Tcp = ETHERNET, collective: Chosen = DEFAULT) -> RepresentativeCost:
    """Return the costs from one rank's messages, for a network that `is_uniform`."""
    return RepresentativeCost(UniformNetwork.of(network), partial(chosen_on_uniform_links, collective, tcp=tcp), tcp)


class NetworkCost:
    """Computes when operations are complete. Lines and connections keep their state."""

    def __init__(self, network: Network, tcp: Tcp = ETHERNET, collective: Chosen = DEFAULT) -> None:
        self._way, self._wires = message_plan(collective, network, tcp), Wires(network, tcp)
        self.world = len(network.hosts)

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]:
        """Return when each rank has its result. Rank r begins ops[r] at starts[r]."""
        return self._wires.run([parts_of(op, rank, self.world, self._way) for rank, op in enumerate(ops)], starts)

    def broadcast(self, nbytes: int, starts: Sequence[float], source: int = 0) -> list[float]:
        """Return when each rank has the `nbytes` bytes of `source`."""
        return self._wires.run(
            [self._way.broadcast(rank, self.world, nbytes, source) for rank in range(self.world)], starts
        )
