"""Torus: every rank exchanges with its four neighbors on a grid with wrap-around."""
# ruff: noqa: A002 -- `round` is the usual name

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from gossamer.algorithms.topologies.base import Topology


@dataclass(frozen=True, repr=False)
class Torus(Topology):
    """Torus: every rank exchanges with its four neighbors on the most nearly square grid with wrap-around.

    rank = row columns + column;  (r, c) sends to (r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1), modulo the sides
    law:    with sides of 3 or more |lambda_2| = 3/5 + 2/5 cos(2 pi / columns): about n rounds to converge on a square
    bytes:  4 messages a rank and round, fewer if a side is 2 or 1; a prime number of workers is a ring
    source: Koloskova et al. 2019, ICML (as one of the graphs measured)

    Example:
        >>> gossamer.Torus().sends_to(0, world=9, round=0)
        (1, 2, 3, 6)
    """

    def sides(self, world: int) -> tuple[int, int]:
        """Return rows and columns; no more rows than columns."""
        rows = next(rows for rows in range(isqrt(world), 0, -1) if world % rows == 0)
        return rows, world // rows

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        rows, columns = self.sides(world)
        row, column = divmod(rank, columns)
        in_row = {row * columns + (column + step) % columns for step in (-1, 1)}
        above = {(row + step) % rows * columns + column for step in (-1, 1)}
        return tuple(sorted((in_row | above) - {rank}))

    def place(self, rank: int, world: int) -> tuple[float, float]:
        rows, columns = self.sides(world)
        row, column = divmod(rank, columns)
        if rows == 1:
            return super().place(rank, world)
        across, down = 2 * column - (columns - 1), 2 * row - (rows - 1)
        return 0.85 * across / (columns - 1), -0.85 * down / (columns - 1)


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(Torus())
