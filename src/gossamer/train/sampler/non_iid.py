"""Dirichlet split: parts of a dataset with equal sizes and unequal label frequencies, and one rank's part."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer import events
from gossamer.base import rng
from gossamer.errors import require
from gossamer.train.sampler.deal import Deal
from gossamer.train.sampler.position import Position, Regrouping, State
from gossamer.train.sampler.sources import Labels, classes_of


class OwnSamples:
    """The samples that one rank keeps, independent of changes of the other ranks."""

    def __init__(
        self, labels: Labels | None, source: object, concentration: float, seed: int, rank: int, size: int
    ) -> None:
        if labels is None:
            raise ValueError(
                f"non_iid={concentration} makes label frequencies unequal, so it needs labels. Write "
                f"world.shard(dataset, labels=[...], non_iid={concentration}), one label per sample."
            )
        self._classes, self._concentration, self._seed = classes_of(labels, source), concentration, seed
        self._moved = False  # whether this worker's rank or the number of workers has changed
        self._belong(rank, size)

    def _belong(self, rank: int, size: int) -> None:
        """Adopt the samples of `rank` in a split among `size` ranks."""
        owners = dirichlet_split(self._classes, size, self._concentration, self._seed)
        self.rank, self.size = rank, size
        self.samples = (owners == rank).nonzero().flatten()

    def noted(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a position; after a change it includes the rank that the samples were split for."""
        return {**state, "own": [self.rank, self.size]} if self._moved else state

    def taken_up(self, state: State) -> State:
        """Convert a saved position to these samples. From another number of workers only the number of drawn samples
        is kept, since each worker had other samples."""
        if "own" in state:
            self._belong(*state["own"])
            self._moved = True
        if "deals" not in state:
            return state
        drawn = sum(map(sum, state["deals"]))
        over = {"over": state["over"]} if "over" in state else {}
        return {"epoch": state["epoch"], "drawn": len(range(self.rank, drawn, self.size)), **over}

    def regrouped(self, before: Position, states: Sequence[State | None], change: Regrouping) -> Position:
        """The position from which this worker continues, given `states` of all workers before: its own; for a new
        worker, the beginning of the others' epoch."""
        if not self._moved and change.rank == 0:
            events.notice(
                "workers joined or left. With non_iid each worker keeps its samples: those of a lost worker are not "
                "used any more, and those of a new worker may also be used by others"
            )
        self._moved = True
        total = before.deal.total
        known = [(old, state) for old, state in enumerate(states) if state is not None]
        read = {old: Position.of(state, total=total, rank=old, size=len(states)) for old, state in known}
        guides = [read[old] for old in change.stayed] or [*read.values()]
        newest = max(each.epoch for each in guides)
        if change.rank < len(change.stayed) or newest == before.epoch:
            return replace(before)
        deal = Deal(total=total, place=self.rank, places=self.size)
        over = all(each.is_over(newest) for each in guides)
        return Position(rank=self.rank, size=self.size, epoch=newest, deal=deal, drawn=deal.part if over else 0)


def dirichlet_split(classes: Tensor, size: int, concentration: float, seed: int = 0) -> Tensor:
    """The rank that owns each sample: (n,).

    q_r ~ Dir(concentration p), p: label frequencies; the ranks in turn draw a label by q_r, then a sample of it
    law:    every sample has one owner; the ranks' numbers of samples differ by at most one
    For large `concentration` every q_r tends to p. For small values a rank has one label until its samples are used up,
    and then the rest of q_r.
    source: Hsu, Qi & Brown 2019, arXiv 1909.06335

    Args:
        classes: number of each sample's label, (n,).
        size: number of ranks.
        concentration: the larger, the more similar are the ranks' labels.
        seed: seed of the draws.
    """
    require(
        isinstance(concentration, int | float) and isfinite(concentration) and concentration > 0,
        f"non_iid is the concentration of a Dirichlet distribution and must be above 0, got {concentration!r}. "
        "Example: world.shard(dataset, labels=labels, non_iid=0.5)",
    )
    numbers = classes.numpy()
    draw = np.random.default_rng(rng.address("non-iid", seed))
    left = [draw.permutation(np.flatnonzero(numbers == label)).tolist() for label in range(int(numbers.max()) + 1)]
    shares = _dirichlet(draw, concentration * np.bincount(numbers) / len(numbers), size)
    edges = _edges(shares, left)
    owners = np.empty(len(numbers), dtype=np.int64)
    for turn, place in enumerate(draw.random(len(numbers)).tolist()):
        bounds = edges[turn % size]
        label = bisect_right(bounds, place * bounds[-1], hi=len(bounds) - 1)
        owners[left[label].pop()] = turn % size
        if not left[label]:
            edges = _edges(shares, left)
    return torch.from_numpy(owners)


def _dirichlet(draw: np.random.Generator, shape: np.ndarray, size: int) -> np.ndarray:
    """`size` draws of a Dirichlet distribution, each up to a factor: (size, labels).

    Computed with logarithms, since gamma variates of a small shape a underflow to 0: G(a) ~ G(a + 1) U^(1/a)
    """
    gammas, uniforms = draw.standard_gamma(shape + 1, (size, len(shape))), draw.random((size, len(shape)))
    logarithms = np.log(gammas) + np.log1p(-uniforms) / shape
    shares: np.ndarray = np.exp(logarithms - logarithms.max(1, keepdims=True))
    return shares


def _edges(shares: np.ndarray, left: Sequence[Sequence[int]]) -> list[list[float]]:
    """Cumulative shares by rank of the labels with remaining samples; sample counts if a rank's shares are all 0."""
    counts = np.array([len(samples) for samples in left], dtype=np.float64)
    open_shares = shares * (counts > 0)
    open_shares[open_shares.sum(1) == 0] = counts
    edges: list[list[float]] = open_shares.cumsum(1).tolist()
    return edges
