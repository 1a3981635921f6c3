"""Sampler: each worker's own part of a dataset, disjoint, covering and resumable."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gossamer import environment
from gossamer.core import rng
from gossamer.errors import require

Labels = Iterable[Hashable] | Tensor
COMEBACK_EPOCHS = 10**6  # more than any run makes, so that a worker that comes back draws in a new order


class Shard(Sampler[int]):
    """This rank's indices: disjoint from the others', together covering all, sizes differing by at most one.

    Every rank works them out from (seed, epoch, rank, size) alone. Each `iter` starts the next epoch,
    reshuffled; the first is epoch 0. After `load_state_dict` the next `iter` goes on where the saved one
    stood, so an epoch that was left early is first brought to its end. `stratify`: one label a sample; the
    samples of a label are dealt out so that their number differs by at most one between ranks. `non_iid`, with
    `labels`: every rank keeps samples of its own, in which few labels are frequent (see `dirichlet_split`).

    Given a sampler instead of a dataset, the ranks deal out what it yields. It draws under torch's global
    generator, seeded for the purpose and restored; randomness of its own must be seeded alike on every rank.

    A worker that was lost and came back begins with an epoch that no worker has drawn: how far it had come is not
    known, and the first samples again would count twice.

    Positions count the indices drawn. A DataLoader with num_workers > 0 draws ahead of training, so a resumed
    run would skip what was fetched and not yet trained on: `session.track(loader)` then counts what the loop took.
    """

    def __init__(
        self,
        source: object,
        *,
        rank: int,
        size: int,
        stratify: Labels | None = None,
        seed: int = 0,
        labels: Labels | None = None,
        non_iid: float | None = None,
    ) -> None:
        self.rank = rank
        self.epoch = COMEBACK_EPOCHS * environment.comebacks()
        self.drawn = 0
        self._source = source
        self._size = size
        self._seed = seed
        self._in_last_batch = False  # whether all is taken, and the loop not told yet that the epoch is over
        self._continues = True
        self._random_state: Tensor | None = None  # of torch's generator as a checkpoint was loaded
        self._began = 0  # the position at which the present iteration began
        self._counted_by_loader = False
        self.tracked = False  # whether a loader knows its own position, however far its workers draw ahead
        self.drawn_ahead = False  # whether workers of a loader draw
        total = _length(source)
        if total < size:
            raise ValueError(
                f"{total} samples cannot be shared among {size} workers: some would have none. "
                f"Start at most {total} workers, or bring more data."
            )
        self._classes = None if stratify is None else _classes(stratify, source)
        self._own = None if non_iid is None else self._own_samples(labels, non_iid)
        if (labels is not None and non_iid is None) or (non_iid is not None and stratify is not None):
            raise ValueError(
                "labels say what non_iid makes unequal, and stratify makes equal, so one of them would be ignored. "
                "Write world.shard(dataset, labels=labels, non_iid=0.5), or world.shard(dataset, stratify=labels)."
            )

    def _own_samples(self, labels: Labels | None, concentration: float) -> Tensor:
        if labels is None:
            raise ValueError(
                f"non_iid={concentration} makes the labels' frequencies unequal, and there are no labels. Write "
                f"world.shard(dataset, labels=[...], non_iid={concentration}), one label a sample."
            )
        owners = dirichlet_split(_classes(labels, self._source), self._size, concentration, self._seed)
        return (owners == self.rank).nonzero().flatten()

    def __len__(self) -> int:
        return len(range(self.rank, _length(self._source), self._size))

    def __iter__(self) -> Iterator[int]:
        self.drawn_ahead = _workers_draw()
        if self._over or (self.drawn and not self._continues):
            self.epoch, self.drawn, self._in_last_batch = self.epoch + 1, 0, False
        elif self.drawn and self._random_state is not None:
            # The loader of the interrupted epoch had taken its seed from torch's generator before the checkpoint; the
            # new one has just taken another, which the run that was never interrupted did not.
            torch.set_rng_state(self._random_state)
        self._began = self.drawn
        return self._draw(self._indices()[self.drawn :])

    def _draw(self, indices: list[int]) -> Iterator[int]:
        for index in indices:
            self._continues, self._random_state = False, None  # not before: loaders ask for iterators they do not use
            if not self._counted_by_loader:
                self.drawn += 1
            yield index

    @property
    def _over(self) -> bool:
        """Whether the loop has come to the epoch's end."""
        return self.drawn >= len(self) and not self._in_last_batch

    # -- positions that a loader counts, since its workers draw ahead --------------------------------------------------

    def let_loader_count(self) -> None:
        """From now on `take` and `finish` say how far training has come, and drawing does not."""
        self._counted_by_loader = self.tracked = True

    @property
    def random_state(self) -> Tensor | None:
        """Of torch's generator, where the next `iter` goes on with an epoch of a checkpoint: as it was loaded."""
        return self._random_state if self.drawn and not self._over else None

    @property
    def resumed(self) -> bool:
        """Whether the next `iter` is the first since a checkpoint was loaded."""
        return self._random_state is not None

    def take(self, count: int) -> None:
        """The loop was given the first `count` indices of the present iteration."""
        self.drawn = min(self._began + count, len(self))
        self._in_last_batch = self.drawn == len(self)

    def finish(self) -> None:
        """The loop was told that the epoch is over."""
        self.drawn, self._in_last_batch = len(self), False
        self._continues, self._random_state = False, None

    def _indices(self) -> list[int]:
        """All of this rank's indices in this epoch, in order."""
        if isinstance(self._source, Sampler):
            return self._sampled(self._source)
        if self._own is not None:
            return self._shuffled(self._own)
        order = torch.randperm(
            _length(self._source), generator=rng.generator("shard", self._seed, self.epoch), device="cpu"
        )
        if self._classes is None:
            return order[self.rank :: self._size].tolist()
        # Dealt out class by class, then shuffled again: a rank would otherwise see its data in class order.
        return self._shuffled(order[self._classes[order].argsort(stable=True)][self.rank :: self._size])

    def _shuffled(self, mine: Tensor) -> list[int]:
        own = rng.generator("shard", self._seed, self.epoch, self.rank)
        return mine[torch.randperm(len(mine), generator=own, device="cpu")].tolist()

    def _sampled(self, sampler: Sampler[int]) -> list[int]:
        before = torch.get_rng_state()
        try:
            # Not torch.manual_seed, which would reseed the GPUs as well.
            torch.default_generator.manual_seed(rng.address("shard", self._seed, self.epoch))
            return list(sampler)[self.rank :: self._size]
        finally:
            torch.set_rng_state(before)

    def state_dict(self) -> dict[str, int]:
        """The epoch and the position in it; with a loader that counts also whether the loop knows of the epoch's end,
        which it does not yet in its last batch."""
        position = {"epoch": self.epoch, "drawn": self.drawn}
        return {**position, "over": self._over} if self._counted_by_loader or self._in_last_batch else position

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.drawn = state["epoch"], state["drawn"]
        self._in_last_batch = self.drawn >= len(self) and not state.get("over", True)
        self._continues, self._random_state = True, torch.get_rng_state()


def dirichlet_split(classes: Tensor, size: int, concentration: float, seed: int = 0) -> Tensor:
    """The rank that owns each sample, (n,); `classes`: the number of each sample's label, (n,).

    q_r ~ Dir(concentration p), p: the labels' frequencies; the ranks in turn draw a label by q_r, then a sample of it
    law:    every sample has one owner; the ranks' numbers of samples differ by at most one
    As `concentration` grows every q_r tends to p; towards 0 a rank has one label, until that one's samples are used up
    and the rest of q_r counts.
    source: Hsu, Qi & Brown 2019, arXiv 1909.06335
    """
    require(
        isfinite(concentration) and concentration > 0,
        f"non_iid is the concentration of a Dirichlet distribution, a number above 0, not {concentration}",
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
    """`size` draws of a Dirichlet distribution up to a factor each, (size, labels).

    By logarithms, since gamma variates of a small shape a are 0 in floating point: G(a) ~ G(a + 1) U^(1/a)
    """
    gammas, uniforms = draw.standard_gamma(shape + 1, (size, len(shape))), draw.random((size, len(shape)))
    logarithms = np.log(gammas) + np.log1p(-uniforms) / shape
    shares: np.ndarray = np.exp(logarithms - logarithms.max(1, keepdims=True))
    return shares


def _edges(shares: np.ndarray, left: Sequence[Sequence[int]]) -> list[list[float]]:
    """Cumulated shares of the labels that have samples left, by rank; of the samples where a rank's shares are 0."""
    counts = np.array([len(samples) for samples in left], dtype=np.float64)
    open_shares = shares * (counts > 0)
    open_shares[open_shares.sum(1) == 0] = counts
    edges: list[list[float]] = open_shares.cumsum(1).tolist()
    return edges


def _workers_draw() -> bool:
    """Whether a DataLoader asks for an index to hand it to its workers; nothing else tells a sampler."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _BaseDataLoaderIter.__module__:  # others' locals are left alone
            return getattr(frame.f_locals.get("self"), "_num_workers", 0) > 0
        frame = frame.f_back
    return False


def _length(source: Any) -> int:
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
        raise TypeError(
            f"{type(source).__name__} has no length or cannot be indexed, so the workers cannot divide its "
            "samples beforehand. Give world.shard a map-style dataset or a sampler with a length; in an iterable "
            "dataset, take every world.size-th sample yourself."
        )
    return len(source)


def _classes(labels: Labels, source: object) -> Tensor:
    """Labels numbered in the order of their first appearance, one a sample."""
    if isinstance(source, Sampler):
        raise TypeError(
            "stratify and labels need a dataset: which samples a sampler will yield is not known beforehand. "
            "Write world.shard(dataset, stratify=labels)."
        )
    numbers: dict[Hashable, int] = {}
    values = labels.tolist() if isinstance(labels, Tensor) else labels
    codes = torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], device="cpu")
    if len(codes) != _length(source):
        raise ValueError(
            f"there are {len(codes)} labels for {_length(source)} samples, so they cannot be matched. "
            "Give one label a sample, in the dataset's order."
        )
    return codes
