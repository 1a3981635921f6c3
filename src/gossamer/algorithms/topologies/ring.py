"""Ring: every rank exchanges with the two adjacent ranks."""
# ruff: noqa: A002 -- `round` is the usual name

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.topologies.base import Topology


@dataclass(frozen=True, repr=False)
class Ring(Topology):
    """Ring: every rank exchanges with the two adjacent ranks.

    rank i sends to i - 1 and i + 1 (mod n);  w_ij = 1/3 for these and itself, from n = 3 on
    law:    |lambda_2| = 1/3 + 2/3 cos(2 pi / n), from n = 3 on: about n^2 rounds to converge
    bytes:  2 messages a rank and round
    source: Lian et al. 2017, NeurIPS

    Synchronous strategies use a ring all-reduce.

    Example:
        >>> gossamer.Ring().sends_to(0, world=5, round=0)
        (1, 4)
    """

    @property
    def collective(self) -> str:
        return "ring"

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(sorted({(rank - 1) % world, (rank + 1) % world} - {rank}))


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(Ring())
