"""Groups: every rank averages with a small group, and the groups change in every round."""
# ruff: noqa: A002 -- `round` is the usual name

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from gossamer.algorithms.topologies.base import Topology
from gossamer.algorithms.topologies.random_peers import SAMPLED_ROUNDS
from gossamer.base import rng
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class Groups(Topology):
    """Changing groups: all ranks are divided into groups of at most `size`, and the members of a group average exactly.

    n = size^d: rank i has the d digits of i in base `size`; round r groups the ranks that differ in digit r mod d only
    other n:    the ranks are shuffled in every round and divided into r = ceil(n / size) groups of almost equal size
    law:    n = size^d: the exact mean of all ranks after d rounds;
            other n: E |W x - mean|^2 = (r - 1) / (n - 1) |x - mean|^2
    bytes:  `size` - 1 messages a rank and round
    source: Ryabinin et al. 2021, NeurIPS (Moshpit SGD)

    All ranks compute the same groups from (seed, round), so no round needs a coordinator. The paper assigns the digits
    by a distributed hash table and forms groups of those that have arrived.

    Args:
        size: largest number of ranks of a group, 2 or more.

    Example:
        >>> gossamer.Groups(size=4).second_eigenvalue(world=16)  # exact after two rounds
        0.0
    """

    size: int = 8

    def __post_init__(self) -> None:
        require(self.size >= 2, f"size must be a number of ranks, 2 or more, got {self.size}. Write Groups(size=8).")

    def rounds(self, world: int) -> int:
        return self._digits(world) or SAMPLED_ROUNDS

    def peers(self, rank: int, world: int) -> tuple[int, ...]:
        if self._digits(world):
            return super().peers(rank, world)
        return tuple(peer for peer in range(world) if peer != rank)

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        digits = self._digits(world)
        if digits:
            place = self.size ** (round % digits)
            first = rank - rank // place % self.size * place
            members = frozenset(range(first, min(first + self.size * place, world), place))
        else:
            members = next(group for group in _shuffled(world, self.size, round, seed) if rank in group)
        return tuple(sorted(members - {rank}))

    def second_eigenvalue(self, world: int) -> float:
        """Return |lambda_2| per round: 0 if d rounds give the exact mean, otherwise the root of the expected factor.

        The matrix of a round is a projection of trace r. By symmetry its expectation has one eigenvalue on all vectors
        that sum to 0, which is (r - 1) / (n - 1).
        """
        if self._digits(world):
            return 0.0
        return float(((-(-world // self.size) - 1) / (world - 1)) ** 0.5)

    def _digits(self, world: int) -> int:
        """Return d for world = size^d, 1 for a single group, and 0 for any other number of ranks."""
        digits = 1
        while self.size**digits < world:
            digits += 1
        return digits if digits == 1 or self.size**digits == world else 0


@lru_cache(maxsize=256)  # called for a rank, then for each of its peers
def _shuffled(world: int, size: int, round: int, seed: int) -> tuple[frozenset[int], ...]:
    order = torch.randperm(world, generator=rng.generator(seed, "groups", round), device="cpu").tolist()
    count = -(-world // size)
    return tuple(frozenset(order[group::count]) for group in range(count))


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(Groups(size=4))
