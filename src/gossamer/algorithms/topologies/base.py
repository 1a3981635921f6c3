"""Base of topologies: the edges of every rank in every round, and their mixing weights."""
# ruff: noqa: A001, A002 -- `round` is the usual name

from __future__ import annotations

from abc import ABC, abstractmethod
from math import cos, fsum, pi, sin
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.base.former_names import warn_former_name
from gossamer.base.term import Term

FORMER_NAMES = {"tells": "sends_to", "hears": "receives_from"}  # of methods, by old name
Weights = tuple[tuple[int, float], ...]  # (peer, weight), ascending by peer


class Crossing(NamedTuple):
    """Compression by `by` between nodes of `per_node` workers only."""

    by: Term
    per_node: int


class Topology(Term, ABC):
    """Base class of topologies: the edges between ranks in each round.

    Methods are pure functions of integers: every rank computes the edges of all ranks without communication.

    Args of the methods:
        rank: in range(world).
        world: number of ranks.
        round: number of the round, from 0.
        seed: equal on every rank; used by random topologies only.

    Example:
        >>> gossamer.Torus().sends_to(0, world=9, round=0)
        (1, 2, 3, 6)
    """

    kind = "topology"

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept methods that a subclass defines by their former names."""
        super().__init_subclass__(**options)
        for old, new in FORMER_NAMES.items():
            if old in vars(cls) and new not in vars(cls):
                warn_former_name(f"{cls.__name__}.{old}", f"def {new}(...)")
                setattr(cls, new, vars(cls)[old])

    @property
    def mutual(self) -> bool:
        """Whether every rank receives from the ranks that it sends to, in every round."""
        return True

    @property
    def collective(self) -> str | None:
        """The name of the collective (table of hops) for a mean over all ranks in lock step; None without one."""
        return None

    @property
    def agrees(self) -> bool:
        """Whether it has a collective for a mean over all ranks, so that synchronous strategies can use it."""
        return self.collective is not None

    @property
    def crossing(self) -> Crossing | None:
        """The compression between nodes in a mean over all ranks."""
        return None

    @property
    def plain(self) -> Topology:
        """The same topology without a `crossing`."""
        return self

    @abstractmethod
    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        """Return the ranks that `rank` sends to in this round, ascending, without itself."""

    def receives_from(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        """Return the ranks that send to `rank` in this round, ascending, without itself."""
        return self.sends_to(rank, world, round, seed)

    def tells(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        """The former name of `sends_to`."""
        warn_former_name("topology.tells", "topology.sends_to")
        return self.sends_to(rank, world, round, seed)

    def hears(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        """The former name of `receives_from`."""
        warn_former_name("topology.hears", "topology.receives_from")
        return self.receives_from(rank, world, round, seed)

    def rounds(self, world: int) -> int:
        """Return the number of rounds to examine: the edges' period, or the size of a sample for random edges."""
        return 1

    def peers(self, rank: int, world: int) -> tuple[int, ...]:
        """Return the ranks that `rank` of `world` exchanges messages with in any round, ascending, without itself."""
        every = range(self.rounds(world))
        receivers = {peer for round in every for peer in self.sends_to(rank, world, round)}
        received = {peer for round in every for peer in self.receives_from(rank, world, round)}
        return tuple(sorted(receivers | received))

    def weights(self, rank: int, world: int, round: int, seed: int = 0) -> Weights:
        """Return the mixing weights of `rank` for its inputs, including itself: a row of `mixing`, without the matrix.

        mutual:   w_ij = 1 / (1 + max(d_i, d_j)) for senders j, and the remainder to 1 for itself; d: degrees
        directed: w_ij = 1 / (1 + d_j) for senders j and for itself; d_j: out-degree of j
        law:      mutual edges give W = W^T, doubly stochastic; directed ones give columns that sum to 1
        source:   Xiao, Boyd & Lall 2005, IPSN (after Metropolis; Xiao & Boyd 2004 omit the 1 + out, and then a ring of
                  two would only swap); Kempe, Dobra & Gehrke 2003, FOCS (directed)
        """
        own_degree = self._degree(rank, world, round, seed)
        degrees = {
            peer: self._degree(peer, world, round, seed) for peer in self.receives_from(rank, world, round, seed)
        }
        if not self.mutual:
            return tuple(sorted((peer, 1 / (1 + degree)) for peer, degree in (degrees | {rank: own_degree}).items()))
        received = {peer: 1 / (1 + max(own_degree, degree)) for peer, degree in degrees.items()}
        return tuple(sorted((received | {rank: 1 - fsum(received.values())}).items()))

    def mixing(self, world: int, round: int = 0, seed: int = 0) -> Tensor:
        """Return W: (world, world) in float64; row i has the weights of rank i's inputs, so that x <- W x."""
        return _matrix([self.weights(rank, world, round, seed) for rank in range(world)])

    def pushes(self, world: int, round: int = 0, seed: int = 0) -> Tensor:
        """Return P: (world, world) in float64; column j has the shares that rank j sends, so that x <- P x, w <- P w.

        p_ij = 1 / (1 + d_j) for receivers i and for itself; d_j: out-degree of j
        law:    every column sums to 1, so sums are preserved; x / w converges to the mean
        source: Kempe, Dobra & Gehrke 2003, FOCS; Assran et al. 2019, ICML
        """
        receivers = [(*self.sends_to(rank, world, round, seed), rank) for rank in range(world)]
        return _matrix([tuple((peer, 1 / len(peers)) for peer in peers) for peers in receivers]).T.contiguous()

    def second_eigenvalue(self, world: int) -> float:
        """Return |lambda_2|: the asymptotic factor of the distance to the mean per round; 0 if the mean is exact.

        If rounds differ, it is computed from the product over a period, per round.
        """
        every = range(self.rounds(world))
        product = torch.eye(world, dtype=torch.float64, device="cpu")
        for round in every:
            product = self.mixing(world, round) @ product
        # Columns sum to 1, so subtracting the mean turns the eigenvalue 1 into 0 and keeps the others (Brauer 1952)
        others = torch.linalg.eigvals(product - 1 / world).abs().tolist()
        return float(max(others) ** (1 / len(every)))

    def spectral_gap(self, world: int) -> float:
        """Return 1 - |lambda_2|: 1 averages in one round, 0 never converges."""
        return 1 - self.second_eigenvalue(world)

    def place(self, rank: int, world: int) -> tuple[float, float]:
        """Return the position of `rank` in a picture, in a square from -1 to 1: on a circle, clockwise from the top."""
        angle = 2 * pi * rank / world
        return sin(angle), cos(angle)

    def _degree(self, rank: int, world: int, round: int, seed: int) -> int:
        return len(self.sends_to(rank, world, round, seed))


def _matrix(rows: list[Weights]) -> Tensor:
    entries = [dict(row) for row in rows]
    table = [[row.get(column, 0.0) for column in range(len(rows))] for row in entries]
    return torch.tensor(table, dtype=torch.float64, device="cpu")
