"""Base of topologies: the edges of every rank in every round, and what follows from them."""
# ruff: noqa: A001, A002 -- a round is the usual name

from __future__ import annotations

from abc import ABC, abstractmethod
from math import cos, fsum, pi, sin
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.base.term import Term

Weights = tuple[tuple[int, float], ...]  # (peer, weight), ascending by peer


class Crossing(NamedTuple):
    """Compression between nodes of `per_node` workers, and only there, by the compressor `by`."""

    by: Term
    per_node: int


class Topology(Term, ABC):
    """The edges between ranks, round after round.

    Pure functions of integers: every rank computes the edges of every other, and nothing is agreed upon over a network.
    rank: in range(world). round: from 0. seed: the same on every rank; only what is drawn depends on it.
    """

    kind = "topology"

    @property
    def mutual(self) -> bool:
        """Whether every rank receives from the ranks that it sends to, in every round."""
        return True

    @property
    def collective(self) -> str | None:
        """The name of the table of hops by which all agree on a mean in lock step; None where there is none like it."""
        return None

    @property
    def agrees(self) -> bool:
        """Whether it also says how all agree on one mean, so that a strategy in lock step can use it."""
        return self.collective is not None

    @property
    def crossing(self) -> Crossing | None:
        """The compression between nodes, where all agree on one mean."""
        return None

    @property
    def plain(self) -> Topology:
        """The same without a `crossing`."""
        return self

    @abstractmethod
    def tells(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        """The ranks that `rank` sends to in this round, ascending, itself left out."""

    def hears(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        """The ranks that send to `rank` in this round, ascending, itself left out."""
        return self.tells(rank, world, round, seed)

    def rounds(self, world: int) -> int:
        """How many rounds to look at to know all: the edges' period, or a sample of those that have none."""
        return 1

    def peers(self, rank: int, world: int) -> tuple[int, ...]:
        """The ranks that `rank` of `world` talks to in any round, ascending, itself left out."""
        every = range(self.rounds(world))
        told = {peer for round in every for peer in self.tells(rank, world, round)}
        heard = {peer for round in every for peer in self.hears(rank, world, round)}
        return tuple(sorted(told | heard))

    def weights(self, rank: int, world: int, round: int, seed: int = 0) -> Weights:
        """How `rank` weighs what it hears, itself included: a row of `mixing`, without the matrix.

        mutual:   w_ij = 1 / (1 + max(d_i, d_j)) for those it hears, and what is left to 1 for itself; d: degrees
        directed: w_ij = 1 / (1 + d_j) for those it hears and for itself; d_j: how many j tells
        law:      mutual edges give W = W^T, of which every row and column sums to 1; directed ones give columns that do
        source:   Xiao, Boyd & Lall 2005, IPSN (after Metropolis; Xiao & Boyd 2004 leave the 1 + out, and then a ring of
                  two would only swap); Kempe, Dobra & Gehrke 2003, FOCS (directed)
        """
        mine = self._degree(rank, world, round, seed)
        theirs = {peer: self._degree(peer, world, round, seed) for peer in self.hears(rank, world, round, seed)}
        if not self.mutual:
            return tuple(sorted((peer, 1 / (1 + degree)) for peer, degree in (theirs | {rank: mine}).items()))
        heard = {peer: 1 / (1 + max(mine, degree)) for peer, degree in theirs.items()}
        return tuple(sorted((heard | {rank: 1 - fsum(heard.values())}).items()))

    def mixing(self, world: int, round: int = 0, seed: int = 0) -> Tensor:
        """W: (world, world) in float64; row i holds how rank i weighs what it hears, so that x <- W x."""
        return _matrix([self.weights(rank, world, round, seed) for rank in range(world)])

    def pushes(self, world: int, round: int = 0, seed: int = 0) -> Tensor:
        """P: (world, world) in float64; column j holds how rank j divides what it has, so that x <- P x, w <- P w.

        p_ij = 1 / (1 + d_j) for those it tells and for itself; d_j: how many it tells
        law:    every column sums to 1: nothing is lost on the way; x / w is the mean in the end
        source: Kempe, Dobra & Gehrke 2003, FOCS; Assran et al. 2019, ICML
        """
        told = [(*self.tells(rank, world, round, seed), rank) for rank in range(world)]
        return _matrix([tuple((peer, 1 / len(peers)) for peer in peers) for peers in told]).T.contiguous()

    def second_eigenvalue(self, world: int) -> float:
        """|lambda_2|: what is left of the distance to the mean after one round, in the long run; 0 where nothing is.

        Where rounds differ: of the product over a period, per round.
        """
        every = range(self.rounds(world))
        product = torch.eye(world, dtype=torch.float64, device="cpu")
        for round in every:
            product = self.mixing(world, round) @ product
        # Columns sum to 1, so taking the mean away turns the eigenvalue 1 into 0 and leaves the others (Brauer 1952)
        others = torch.linalg.eigvals(product - 1 / world).abs().tolist()
        return float(max(others) ** (1 / len(every)))

    def spectral_gap(self, world: int) -> float:
        """1 - |lambda_2|: 1 averages at once, 0 never does."""
        return 1 - self.second_eigenvalue(world)

    def place(self, rank: int, world: int) -> tuple[float, float]:
        """Where a picture shows `rank`, in a square from -1 to 1: on a circle, clockwise from the top."""
        angle = 2 * pi * rank / world
        return sin(angle), cos(angle)

    def _degree(self, rank: int, world: int, round: int, seed: int) -> int:
        return len(self.tells(rank, world, round, seed))


def _matrix(rows: list[Weights]) -> Tensor:
    entries = [dict(row) for row in rows]
    table = [[row.get(column, 0.0) for column in range(len(rows))] for row in entries]
    return torch.tensor(table, dtype=torch.float64, device="cpu")
