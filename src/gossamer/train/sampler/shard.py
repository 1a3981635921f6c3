"""Shard: a sampler of this rank's indices, resumed from checkpoints and divided again after changes of the workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gossamer.base import rng
from gossamer.train.sampler.non_iid import OwnSamples
from gossamer.train.sampler.position import Position, Regrouping, State, dealt_among
from gossamer.train.sampler.progress import ShardProgress
from gossamer.train.sampler.sources import Labels, classes_of, digest_of, length_of


class Shard(ShardProgress, Sampler[int]):
    """Sampler of this rank's indices: disjoint from those of other ranks, together covering the dataset.

    The sizes of the ranks' parts differ by at most one, or follow the ranks' speeds under strategies with balance=True.
    Each rank computes its part from (seed, epoch, rank, size) without communication. Each `iter` starts the next epoch,
    from 0. After `load_state_dict` the next `iter` continues at the saved position, so an interrupted epoch is
    completed first.

    When workers join or leave during an epoch, `regroup` divides the rest again, and active iterators continue with it:
    every sample of the epoch is used once, except those drawn by lost workers. A lost worker that returns alone starts
    with an epoch that no worker has drawn, since its own position is unknown.

    Positions count drawn indices. A DataLoader with num_workers > 0 draws ahead of training, so a resumed run would
    skip samples that were fetched but not trained on. Use `session.track(loader)`, which counts the samples that the
    loop received.

    Args:
        source: a map-style dataset, or a sampler; the ranks divide its indices. A sampler draws with torch's global
            generator, which is seeded before and restored afterwards; other random generators in it must be seeded
            equally on every rank.
        rank, size: this rank, and the number of ranks.
        stratify: one label per sample; the number of samples of each label differs by at most one between ranks.
        seed: of the shuffle.
        shuffle: reshuffle in each epoch.
        labels: one label per sample, for `non_iid`.
        non_iid: concentration of a Dirichlet distribution, above 0; each rank keeps its own samples, with few frequent
            labels (see `dirichlet_split`).

    Raises:
        ValueError: fewer samples than workers, or contradictory arguments.
        TypeError: `source` has no length.

    Example:
        >>> list(gossamer.Shard(range(6), rank=0, size=2, shuffle=False))
        [0, 2, 4]
    """

    def __init__(
        self,
        source: object,
        *,
        rank: int,
        size: int,
        stratify: Labels | None = None,
        seed: int = 0,
        shuffle: bool = True,
        labels: Labels | None = None,
        non_iid: float | None = None,
    ) -> None:
        self._source, self._seed, self._shuffle = source, seed, shuffle
        total = length_of(source)
        if total < size:
            raise ValueError(
                f"{total} samples cannot be divided among {size} workers: some would have none. "
                f"Start at most {total} workers, or use more data."
            )
        super().__init__(rank, size)
        self.drawn_ahead = False  # whether workers of a loader draw
        self._classes = None if stratify is None else classes_of(stratify, source)
        self._own = None if non_iid is None else OwnSamples(labels, source, non_iid, seed, rank, size)
        if (labels is not None and non_iid is None) or (non_iid is not None and stratify is not None):
            raise ValueError(
                "labels are for non_iid, which makes label frequencies unequal; stratify makes them equal. "
                "Write world.shard(dataset, labels=labels, non_iid=0.5), or world.shard(dataset, stratify=labels)."
            )

    def _total(self) -> int:
        return length_of(self._source)

    def __len__(self) -> int:
        """Number of this rank's indices in the current epoch, before and after changes; else in the next epoch."""
        at = self._at
        if self._own is not None:
            return len(self._own.samples)
        if at.begun and not at.over:
            return at.before + at.deal.part
        return dealt_among(range(at.size), at.rank, at.widths, total=length_of(self._source)).part

    @property
    def data(self) -> str:
        """A text that is equal on ranks with the same data."""
        return digest_of(self._source)

    @property
    def lap(self) -> int | None:
        """None if all epochs have the same order, or ranks have separate samples."""
        if self._own is not None or not (self._shuffle or isinstance(self._source, Sampler)):
            return None
        at, total = self._at, length_of(self._source)
        now = at.drawn * at.deal.places // (at.deal.width * at.size)  # of equal parts
        drawn = at.epoch * (total // at.size) + sum(map(sum, at.deal.drawn)) // at.size + now
        return drawn // max(1, total // (2 * at.size))

    # -- drawing -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        self.drawn_ahead = _workers_draw()
        at = self._entered()
        if not at.begun:
            at.deal = replace(at.deal, total=length_of(self._source))  # a dataset may have grown between epochs
        order = self._order(at.epoch)
        self._at, self._began = at, at.drawn
        kept = order if isinstance(order, list) else None  # a sampler is iterated once per epoch
        return self._draw(at, self._indices(at, order), kept)

    def _draw(self, at: Position, indices: list[int], order: list[int] | None) -> Iterator[int]:
        place = at.drawn
        while True:
            now = self._at
            if now is not at and now.run is at.run:  # workers joined or left
                at, place = now, now.drawn
                indices = self._indices(at, self._order(at.epoch) if order is None else order)
            if place >= len(indices):
                break
            self._continues, self._random_state = False, None  # only now: loaders also create iterators without use
            if not self._counted_by_loader:
                at.drawn += 1
            yield indices[place]
            place += 1
        if not self._counted_by_loader:
            at.in_last_batch = False

    def _order(self, epoch: int) -> Tensor | list[int]:
        """The common order of an epoch, which all ranks divide."""
        if isinstance(self._source, Sampler):
            return self._sampled(self._source, epoch)
        total = length_of(self._source)
        if self._shuffle:
            order = torch.randperm(total, generator=rng.generator("shard", self._seed, epoch), device="cpu")
        else:
            order = torch.arange(total, device="cpu")
        return order if self._classes is None else order[self._classes[order].argsort(stable=True)]

    def _sampled(self, sampler: Sampler[int], epoch: int) -> list[int]:
        before = torch.get_rng_state()
        try:
            # torch.manual_seed would reseed the GPUs as well.
            torch.default_generator.manual_seed(rng.address("shard", self._seed, epoch))
            return list(sampler)
        finally:
            torch.set_rng_state(before)

    def _indices(self, at: Position, order: Tensor | list[int]) -> list[int]:
        """All of this rank's indices under the newest deal, in order."""
        if self._own is not None:
            return self._shuffled(self._own.samples, at.epoch, self._own.rank).tolist()
        # A sampler may yield more or fewer entries than its length
        deal = at.deal if at.deal.drawn else replace(at.deal, total=len(order))
        if isinstance(order, list):
            return [order[entry] for entry in deal.entries().tolist() if entry < len(order)]
        if self._classes is None:
            return order[deal.entries()].tolist()

        # Divided class by class, then shuffled again; otherwise a rank would receive its data in class order.
        def arranged(entries: Tensor, deals_before: int, place: int) -> Tensor:
            if not self._shuffle:
                return entries[order[entries].argsort()]
            return self._shuffled(entries, at.epoch, place, *([deals_before] if deals_before else []))

        return order[deal.entries(arranged)].tolist()

    def _shuffled(self, local: Tensor, *address: int) -> Tensor:
        if not self._shuffle:
            return local.sort().values
        own = rng.generator("shard", self._seed, *address)
        return local[torch.randperm(len(local), generator=own, device="cpu")]

    # -- checkpoints and changes of the workers, with non_iid ----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self._own is None else self._own.noted(state)

    def follows_speed(self, rank: int, size: int) -> bool:
        return self._own is None and self._classes is None and super().follows_speed(rank, size)

    def load_state_dict(self, state: State) -> None:
        if self._own is None:
            return super().load_state_dict(state)
        state = self._own.taken_up(state)
        self._take_up(self._position(state, self._own.rank, self._own.size))

    def _regrouped(self, positions: Sequence[State | None], change: Regrouping) -> Position:
        if self._own is None:
            return super()._regrouped(positions, change)
        return self._own.regrouped(self._at, positions, change)


def _workers_draw() -> bool:
    """Whether a DataLoader requests an index for its workers, found in the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _BaseDataLoaderIter.__module__:  # do not touch locals of other modules
            return getattr(frame.f_locals.get("self"), "_num_workers", 0) > 0
        frame = frame.f_back
    return False
