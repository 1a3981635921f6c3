"""Representative cost: when operations are answered where all ranks do alike, by the messages of one of them.

For groups of any size on a uniform network, in time that grows with what one rank sends. Beside a simulation of all
ranks (op_cost.NetworkCost):

- all-gathers, all-to-alls of equal parts, exchanges along a ring, torus or other graph that looks alike from each rank,
  and means by `direct` and `ring` take as long, to 1e-9, where tensors are cut into equal pieces and nothing else is
  under way;
- pieces count as long as the longest, an element longer than the shortest where a tensor cannot be cut evenly; so do
  the parts of an all-to-all;
- for `halving`, `tree` and `hierarchical` see representative_tables;
- an operation is answered on all ranks when it is answered on the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from gossamer.algorithms.collectives import Collective
from gossamer.base.identity import Itself
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
from gossamer.comm.network.cost.representative_rank import Peers, RepresentativeRank, UniformNetwork
from gossamer.comm.network.cost.representative_tables import table_end
from gossamer.comm.network.tcp_model import ETHERNET, Tcp

Choose = Callable[[int, int, UniformNetwork], Collective]  # the table for so many bytes of such items there


class RepresentativeCost:
    """Answer times of a group whose ranks do alike (an AnswerTimes). Lines and connections remember what they carried.

    Any number of ranks may be asked for at once: those that it is given stand for all, and begin when the last does.
    """

    def __init__(self, network: UniformNetwork, choose: Choose, tcp: Tcp = ETHERNET) -> None:
        self._network, self._choose = network, choose
        self._rank = RepresentativeRank(network, tcp)
        self._all = np.arange(network.world)

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]:
        """The moments at which ranks have their answers, if all ask for ops[0] when the last of them does."""
        return [self._end(ops[0], self._all, max(starts))] * len(starts)

    def broadcast(self, nbytes: int, starts: Sequence[float], source: int = 0) -> list[float]:
        """The source scatters parts, and the last rank that has one passes it on to the others."""
        peers, part = self._all[1:], -(-nbytes // max(1, len(self._all) - 1))
        scattered = self._rank.exchange(peers, part, max(starts))
        return [self._rank.exchange(peers[:-1], part, scattered)] * len(starts)

    def _end(self, op: CollectiveOp, ranks: Peers, now: float) -> float:
        match op:
            case AllReduceMean(tensor):
                return self._mean(tensor.numel(), tensor.element_size(), ranks, now)
            case AllGather(payload):
                return self._rank.exchange(ranks[1:], payload_bytes(payload), now)
            case AllToAll():
                return self._rank.exchange(ranks[1:], _largest_part(Itself(op)), now)
            case NeighborAllGather(payload):
                told, heard = ([peer for peer in peers if peer] for peers in (op.told, op.hears))
                return self._rank.exchange(ranks[max(told, heard, key=len)], payload_bytes(payload), now)
            case InGroup(group, inner):
                return self._end(inner, ranks[np.array(group) - group[0]], now)
            case Coalesced():
                means_last = sorted(op.concurrent(), key=lambda each: isinstance(each, AllReduceMean))
                return max(self._end(each, ranks, now) for each in means_last)

    def _mean(self, numel: int, itemsize: int, ranks: Peers, now: float) -> float:
        if len(ranks) == 1:
            return now
        there = UniformNetwork(len(ranks), self._network.host, self._network.path)
        return table_end(self._choose(numel * itemsize, itemsize, there), numel, itemsize, self._rank, ranks, now)


@lru_cache(maxsize=64)
def _largest_part(op: Itself[AllToAll]) -> int:
    return max(payload_bytes(part) for part in {id(part): part for part in op.item.parts}.values())
