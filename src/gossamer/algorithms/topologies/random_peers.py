"""Random peers: every rank exchanges with random partners in every round."""
# ruff: noqa: A001, A002 -- `round` is the usual name

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import fsum

import torch

from gossamer.algorithms.topologies.base import Topology
from gossamer.base import rng
from gossamer.errors import require

SAMPLED_ROUNDS = 256  # enough to estimate the convergence rate of two draws to about 2 %


@dataclass(frozen=True, repr=False)
class RandomPeers(Topology):
    """Random topology: every rank exchanges with `count` random partners, which change in every round.

    All ranks are paired at random, `count` times per round; one rank idles if their number is odd
    law:    E |W x - mean|^2 = lambda |x - mean|^2;  count = 1: lambda = (n - 2) / (2 (n - 1)), or 1/2 where n is odd
    bytes:  `count` messages a rank and round, fewer if the same pair is drawn again
    source: Boyd et al. 2006, IEEE Transactions on Information Theory (of one pair at a time)

    All ranks draw the same pairs from (seed, round).

    Args:
        count: partners per round.

    Example:
        >>> gossamer.Gossip() + gossamer.RandomPeers()
        Gossip() + RandomPeers()
    """

    count: int = 1

    def __post_init__(self) -> None:
        require(self.count >= 1, f"count must be a number of partners per round, 1 or more, got {self.count}")

    def rounds(self, world: int) -> int:
        return SAMPLED_ROUNDS

    def peers(self, rank: int, world: int) -> tuple[int, ...]:
        return tuple(peer for peer in range(world) if peer != rank)

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        drawn = {_partners(world, round, seed, draw)[rank] for draw in range(self.count)}
        return tuple(sorted(drawn - {rank}))

    def second_eigenvalue(self, world: int) -> float:
        """Return the root of the expected squared factor of the distance to the mean per round.

        By symmetry, E[W^T W] has one eigenvalue on all vectors that sum to 0, which follows from its trace E |W|^2.
        Exact for count = 1, with a constant |W|; otherwise estimated from a sample of rounds.
        """
        if world == 1:
            return 0.0
        every = ((rank, round) for round in range(SAMPLED_ROUNDS) for rank in range(world))
        squares = fsum(weight**2 for rank, round in every for _, weight in self.weights(rank, world, round))
        return float(((squares / SAMPLED_ROUNDS - 1) / (world - 1)) ** 0.5)


@lru_cache(maxsize=256)  # called for a rank, then for each of its peers
def _partners(world: int, round: int, seed: int, draw: int) -> tuple[int, ...]:
    """Return the partner of each rank; itself if it idles."""
    source = rng.generator(seed, "random peers", round, draw)
    order = torch.randperm(world, generator=source, device="cpu").tolist()
    partners = list(range(world))
    for one, other in zip(order[::2], order[1::2], strict=False):  # if the number is odd, the last one idles
        partners[one], partners[other] = other, one
    return tuple(partners)


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(RandomPeers(), RandomPeers(count=2))
