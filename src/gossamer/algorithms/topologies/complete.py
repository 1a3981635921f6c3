"""Complete graph: every rank exchanges with all others."""
# ruff: noqa: A002 -- `round` is the usual name

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.topologies.base import Topology, Weights


@dataclass(frozen=True, repr=False)
class Complete(Topology):
    """Fully connected topology; the all-reduce algorithm is selected automatically.

    rank i sends to every j;  w_ij = 1/n
    law:   |lambda_2| = 0: the mean after one round
    bytes: n - 1 messages a rank and round

    Example:
        >>> gossamer.Complete().spectral_gap(world=8) > 0.999
        True
    """

    @property
    def agrees(self) -> bool:
        return True  # by the fastest collective

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(peer for peer in range(world) if peer != rank)

    def weights(self, rank: int, world: int, round: int, seed: int = 0) -> Weights:
        return tuple((peer, 1 / world) for peer in range(world))  # the same weights without computing degrees


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(Complete())
