"""Exponential graph: every rank sends to the ranks a power of two ahead."""
# ruff: noqa: A002 -- `round` is the usual name

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.topologies.base import Topology


@dataclass(frozen=True, repr=False)
class Exponential(Topology):
    """Exponential graph: every rank sends to the ranks a power of two ahead, and receives from those as far behind.

    rank i sends to i + 2^k (mod n) for every k < ceil(log2 n); with one_peer for k = round mod ceil(log2 n) alone
    law:    |lambda_2| <= 1 - 2 / (1 + ceil(log2 n)), with equality for even n; with one_peer the exact mean after
            log2 n rounds if and only if n is a power of two
    bytes:  ceil(log2 n) messages a rank and round; with one_peer 1
    source: Ying et al. 2021, NeurIPS; Assran et al. 2019, ICML (one peer)

    Edges are directed. All ranks have the same in-degree and out-degree, so rows of the weights sum to 1, too.
    Synchronous strategies use recursive halving and doubling, with one peer at a time.

    Args:
        one_peer: whether a rank sends to one peer per round instead of all.

    Example:
        >>> gossamer.Exponential().sends_to(0, world=8, round=0)
        (1, 2, 4)
    """

    one_peer: bool = False

    @property
    def collective(self) -> str:
        return "halving"

    @property
    def mutual(self) -> bool:
        return False

    def rounds(self, world: int) -> int:
        return max(len(_distances(world)), 1) if self.one_peer else 1

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(sorted((rank + distance) % world for distance in self._now(world, round)))

    def receives_from(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(sorted((rank - distance) % world for distance in self._now(world, round)))

    def _now(self, world: int, round: int) -> tuple[int, ...]:
        every = _distances(world)
        turn = round % self.rounds(world)
        return every[turn : turn + 1] if self.one_peer else every


def _distances(world: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... below `world`."""
    return tuple(2**power for power in range((world - 1).bit_length()))


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(Exponential(), Exponential(one_peer=True))
