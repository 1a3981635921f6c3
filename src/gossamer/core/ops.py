"""The words an algorithm may say, and where it stands when it says them.

An algorithm is a generator: it yields a word ("I need the mean of this tensor") and receives the answer. It never
touches a network. Everything that runs algorithms (a process group, a simulation, a price list) only answers words.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

Payload = tuple[Tensor, ...]


@dataclass(frozen=True)
class AllReduceMean:
    """Ask for the elementwise mean of `tensor` over the group, in the tensor's shape and dtype.

    Half-precision tensors travel as they are, are summed in float32 and rounded once (NCCL sums them its own way). The
    answer is written to `out`
    where one is given; `out` may be `tensor` itself.
    """

    name: ClassVar[str] = "Mean"  # in what explain prints and records

    tensor: Tensor
    out: Tensor | None = None


@dataclass(frozen=True)
class AllGather:
    """Ask for everyone's `payload`, by rank. Shapes and dtypes are the same on every rank."""

    name: ClassVar[str] = "Gather"  # in what explain prints and records

    payload: Payload


@dataclass(frozen=True)
class AllToAll:
    """Send `parts[j]` to rank j; ask for what each rank addressed to me.

    What is addressed to rank j has the same shapes and dtypes whoever sends it.
    """

    name: ClassVar[str] = "Exchange"  # in what explain prints and records

    parts: tuple[Payload, ...]


@dataclass(frozen=True)
class NeighborAllGather:
    """Ask for the payloads of those whom I hear, in the order of `edges` = ((peer, weight), ...); I may hear myself.

    tells: whom mine goes to; None: the same peers. i tells j exactly where j hears i. Shapes and dtypes are the same on
    every rank. The weights are for the asker: a transport reads only the peers.
    """

    name: ClassVar[str] = "Mix"  # in what explain prints and records

    payload: Payload
    edges: tuple[tuple[int, float], ...]
    tells: tuple[int, ...] | None = None

    @property
    def hears(self) -> tuple[int, ...]:
        return tuple(peer for peer, _ in self.edges)

    @property
    def told(self) -> tuple[int, ...]:
        """Whom the payload goes to."""
        return self.hears if self.tells is None else self.tells


@dataclass(frozen=True)
class InGroup:
    """Ask for `word`, said only by `ranks`: ascending, this one among them. Within it, ranks are places in `ranks`.

    Everyone says an Among at the same moment, in groups that do not overlap, and each group its own word.
    """

    name: ClassVar[str] = "Among"  # in what explain prints and records

    ranks: tuple[int, ...]
    op: AllReduceMean | AllGather | AllToAll | NeighborAllGather

    def group_of(self, rank: int, world: int) -> tuple[int, ...]:
        """Those among whom `rank` speaks meanwhile, if all groups are alike: blocks of neighbours, or every k-th rank.

        Alone, where there is no such group left for it.
        """
        if rank in self.ranks:
            return self.ranks
        step = self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1
        reach = step * len(self.ranks)
        first = rank // reach * reach + rank % step
        group = tuple(range(first, first + reach, step))
        return group if group[-1] < world and not set(group) & set(self.ranks) else (rank,)


@dataclass(frozen=True)
class Coalesced:
    """Ask for several words at once, none of which waits for another; the answers come in the same order."""

    name: ClassVar[str] = "Together"  # in what explain prints and records

    ops: tuple[AllReduceMean | AllGather | AllToAll | NeighborAllGather | InGroup, ...]


CollectiveOp = AllReduceMean | AllGather | AllToAll | NeighborAllGather | InGroup | Coalesced


def payload_bytes(payload: Payload) -> int:
    return sum(tensor.nbytes for tensor in payload)


def bytes_sent(op: CollectiveOp, world: int, rank: int = 0) -> float:
    """Payload bytes that one of `world` workers sends to have `word` answered; headers are not counted.

    A mean costs what a reduce-scatter and an all-gather cost, on average over the workers: 2 (n-1)/n of its bytes.
    """
    match op:
        case AllReduceMean(tensor):
            return 2 * (world - 1) * tensor.nbytes / world
        case AllGather(payload):
            return float((world - 1) * payload_bytes(payload))
        case AllToAll(parts):
            return float(sum(payload_bytes(part) for peer, part in enumerate(parts) if peer != rank))
        case NeighborAllGather(payload):
            return float(sum(peer != rank for peer in op.told) * payload_bytes(payload))
        case InGroup(ranks, inner):
            return bytes_sent(inner, len(ranks), ranks.index(rank))
        case Coalesced(ops):
            return sum(bytes_sent(each, world, rank) for each in ops)


Script = Generator[CollectiveOp, Any, Any]


def in_group(ranks: tuple[int, ...], script: Script) -> Script:
    """What a group of as many as `ranks` says, said among these of a larger one."""
    answer: Any = None
    while True:
        try:
            op = script.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield _among(ranks, op)


def _among(ranks: tuple[int, ...], op: CollectiveOp) -> CollectiveOp:
    """Groups within groups are groups, and an Among holds one word."""
    match op:
        case Coalesced(ops):
            return Coalesced(tuple(_among(ranks, each) for each in ops))  # type: ignore[misc]
        case InGroup(places, inner):
            return InGroup(tuple(ranks[place] for place in places), inner)
        case _:
            return InGroup(ranks, op)
