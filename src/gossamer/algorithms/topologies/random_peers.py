"""Random peers: every rank exchanges with others that are drawn anew in every round."""
# ruff: noqa: A001, A002 -- a round is the usual name

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import fsum

import torch

from gossamer.algorithms.topologies.base import Topology
from gossamer.base import rng
from gossamer.errors import require

SAMPLED_ROUNDS = 256  # tell the decay of two draws to about 2 %


@dataclass(frozen=True, repr=False)
class RandomPeers(Topology):
    """Everyone talks to `count` others, drawn anew in every round, which talk back.

    Pairs are drawn `count` times, each time all ranks in pairs; if their number is odd, one rests
    law:    E |W x - mean|^2 = lambda |x - mean|^2;  count = 1: lambda = (n - 2) / (2 (n - 1)), or 1/2 where n is odd
    bytes:  `count` messages a rank and round, fewer where the same pair is drawn again
    source: Boyd et al. 2006, IEEE Transactions on Information Theory (of one pair at a time)

    All ranks draw the same pairs from (seed, round).
    """

    count: int = 1

    def __post_init__(self) -> None:
        require(self.count >= 1, f"count is a number of workers to talk to, 1 or more, not {self.count}")

    def rounds(self, world: int) -> int:
        return SAMPLED_ROUNDS

    def peers(self, rank: int, world: int) -> tuple[int, ...]:
        return tuple(peer for peer in range(world) if peer != rank)

    def tells(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        drawn = {_partners(world, round, seed, draw)[rank] for draw in range(self.count)}
        return tuple(sorted(drawn - {rank}))

    def second_eigenvalue(self, world: int) -> float:
        """What is left of the distance to the mean after one round, as a root of the expected square.

        No rank is special, so E[W^T W] has one eigenvalue on all vectors that sum to 0, and its trace E |W|^2 tells
        it. Exact for count = 1, where |W| is always the same; otherwise over a sample of rounds.
        """
        if world == 1:
            return 0.0
        every = ((rank, round) for round in range(SAMPLED_ROUNDS) for rank in range(world))
        squares = fsum(weight**2 for rank, round in every for _, weight in self.weights(rank, world, round))
        return float(((squares / SAMPLED_ROUNDS - 1) / (world - 1)) ** 0.5)


@lru_cache(maxsize=256)  # a rank asks about itself, then about each of its peers
def _partners(world: int, round: int, seed: int, draw: int) -> tuple[int, ...]:
    """The partner of each rank; itself where it rests."""
    source = rng.generator(seed, "random peers", round, draw)
    order = torch.randperm(world, generator=source, device="cpu").tolist()
    partners = list(range(world))
    for one, other in zip(order[::2], order[1::2], strict=False):  # where the number is odd, the last one rests
        partners[one], partners[other] = other, one
    return tuple(partners)


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(RandomPeers(), RandomPeers(count=2))
