"""Representative tables: how long a table of hops takes where all ranks do alike, by the rank that has most to do.

A round ends when the last of its messages is here. In `direct` and `ring`, which look alike from every rank, that is
so. In `halving` and `hierarchical` a piece could go on before the others of its round are here, and in `halving` of a
world that is no power of two, as in a `hierarchical` one whose last node is smaller, some ranks have less to do. A
`tree` is taken along a path from its deepest leaf to the root and back; what follows a first chunk is as fast as the
line of a rank with a parent and two children.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import groupby
from math import ceil, inf

import numpy as np

from gossamer.algorithms.collectives import Collective, Does, TreeAllReduce
from gossamer.comm.network.cost.message_schedule import CHUNK_BYTES
from gossamer.comm.network.cost.representative_rank import Peers, RepresentativeRank, UniformNetwork
from gossamer.comm.network.tcp_model import ETHERNET, Tcp

AS_FAST = 1.001  # times another price is the same price
REST_SECONDS = 1.0  # of computing between one mean and the next, in which connections forget how fast they were
MOST_MEANS = 4  # after which connections are as they will be before the next


def table_end(
    collective: Collective, numel: int, itemsize: int, rank: RepresentativeRank, ranks: Peers, now: float
) -> float:
    """When the last of a group has the sum of a tensor, if all begin now. ranks: the group's, by place."""
    world = len(ranks)
    if isinstance(collective, TreeAllReduce):
        return _tree_end(numel * itemsize, rank, world, now)
    pieces = collective.pieces(world)
    nbytes = ceil(numel / pieces) * itemsize
    for count, places, messages in _rounds(collective, world, min(numel, pieces)):
        now = rank.rounds(count, ranks[places], nbytes, now, messages)
    return now


def table_seconds_alike(
    collective: Collective,
    nbytes: int,
    itemsize: int,
    network: UniformNetwork,
    tcp: Tcp = ETHERNET,
    rest_seconds: float = REST_SECONDS,
) -> float:
    """How long a sum takes when all ranks begin at once, as they have done before, each time after a rest."""
    rank, ranks = RepresentativeRank(network, tcp), np.arange(network.world)
    begin, before = 0.0, inf
    for _ in range(MOST_MEANS):
        end = table_end(collective, nbytes // itemsize, itemsize, rank, ranks, begin)
        seconds, begin = end - begin, end + rest_seconds
        if before / AS_FAST <= seconds <= before * AS_FAST:
            break
        before = seconds
    return seconds


@lru_cache(maxsize=256)
def _rounds(collective: Collective, world: int, filled: int) -> tuple[tuple[int, Peers, int], ...]:
    """(rounds that are alike, places of the peers, messages with each) of the busiest rank.

    filled: how many pieces are not empty, the first ones. Of what travels in a round one at least is not, somewhere.
    """
    busiest = collective.busiest(world)
    found: list[tuple[tuple[int, ...], int]] = []
    for _, hops in groupby(collective.hops(busiest, world), key=lambda hop: hop.round):
        sent, heard = Counter[int](), Counter[int]()
        for hop in hops:
            way = sent if hop.does is Does.SEND else heard
            way[hop.peer] += max(1, min(hop.stop, filled) - hop.first)
        peers = sent or heard
        messages = max(max(way.values(), default=0) for way in (sent, heard))
        found.append((tuple((peer - busiest) % world for peer in peers), messages))
    return tuple((len(list(same)), np.array(peers), messages) for (peers, messages), same in groupby(found))


def _tree_end(nbytes: int, rank: RepresentativeRank, world: int, now: float) -> float:
    """Up and down through all levels, two children at each."""
    depth, chunks = world.bit_length() - 1, ceil(nbytes / CHUNK_BYTES)
    for hop in range(2 * depth):  # each by a rank whose connections have carried nothing yet
        now = rank.exchange(np.array([2 * hop + 1, 2 * hop + 2])[: world - 1], nbytes / chunks, now)
    lines = np.arange(1, 4) if world > 4 else np.arange(1, 3)
    return rank.exchange(lines, nbytes / chunks, now, chunks - 1)
