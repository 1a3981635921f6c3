"""Shard: a sampler of this rank's indices, which a checkpoint resumes and a change of the workers deals out anew."""

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

from gossamer import environment
from gossamer.core import rng
from gossamer.sampler.deal import Deal
from gossamer.sampler.non_iid import OwnSamples
from gossamer.sampler.position import Position, State, regrouped, supposed
from gossamer.sampler.sources import Labels, classes_of, length_of

COMEBACK_EPOCHS = 10**6  # more than any run makes, so that a worker that comes back draws in a new order


class Shard(Sampler[int]):
    """This rank's indices: disjoint from the others', together covering all, sizes differing by at most one.

    Every rank works them out from (seed, epoch, rank, size) alone. Each `iter` starts the next epoch,
    reshuffled unless `shuffle` is False; the first is epoch 0. After `load_state_dict` the next `iter` goes on
    where the saved one stood, so an epoch that was left early is first brought to its end. `stratify`: one label a
    sample; the samples of a label are dealt out so that their number differs by at most one between ranks.
    `non_iid`, with `labels`: every rank keeps samples of its own, in which few labels are frequent (see
    `dirichlet_split`).

    Given a sampler instead of a dataset, the ranks deal out what it yields. It draws under torch's global
    generator, seeded for the purpose and restored; randomness of its own must be seeded alike on every rank.

    Where workers come and go within an epoch, `regroup` deals out what nobody has drawn, and an iterator under way
    goes on with it: every sample of the epoch is used once, whatever happens, but for those that the lost had drawn.

    A worker that was lost and came back alone begins with an epoch that no worker has drawn: how far it had come is not
    known, and the first samples again would count twice.

    Positions count the indices drawn. A DataLoader with num_workers > 0 draws ahead of training, so a resumed
    run would skip what was fetched and not yet trained on, and so would those who go on after a lost worker:
    `session.track(loader)` then counts what the loop took.
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
        self._continues = True  # whether the next `iter` goes on with an epoch that was begun
        self._random_state: Tensor | None = None  # of torch's generator as a checkpoint was loaded
        self._began = 0  # the position at which the present iteration began
        self._counted_by_loader = False
        self.tracked = False  # whether a loader knows its own position, however far its workers draw ahead
        self.drawn_ahead = False  # whether workers of a loader draw
        total = length_of(source)
        if total < size:
            raise ValueError(
                f"{total} samples cannot be shared among {size} workers: some would have none. "
                f"Start at most {total} workers, or bring more data."
            )
        # One reference, which another thread than the one that draws replaces where workers come and go
        self._at = self._beginning(COMEBACK_EPOCHS * environment.comebacks(), rank, size)
        self._classes = None if stratify is None else classes_of(stratify, source)
        self._own = None if non_iid is None else OwnSamples(labels, source, non_iid, seed, rank, size)
        if (labels is not None and non_iid is None) or (non_iid is not None and stratify is not None):
            raise ValueError(
                "labels say what non_iid makes unequal, and stratify makes equal, so one of them would be ignored. "
                "Write world.shard(dataset, labels=labels, non_iid=0.5), or world.shard(dataset, stratify=labels)."
            )

    def _beginning(self, epoch: int, rank: int, size: int) -> Position:
        deal = Deal(total=length_of(self._source), place=rank, places=size)
        return Position(rank=rank, size=size, epoch=epoch, deal=deal)

    @property
    def rank(self) -> int:
        """Whose part this is; with non_iid, of the ranks among whom the samples were split."""
        return self._at.rank

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or was the last."""
        return self._at.epoch

    @property
    def drawn(self) -> int:
        """How many indices were drawn in this epoch; after a change of the workers, since the last one."""
        return self._at.drawn

    def __len__(self) -> int:
        """How many indices this rank has in the epoch under way, before and after changes; else in the next."""
        at = self._at
        if self._own is not None:
            return len(self._own.samples)
        if at.begun and not at.over:
            return at.before + at.deal.part
        return len(range(at.rank, length_of(self._source), at.size))

    # -- drawing -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        self.drawn_ahead = _workers_draw()
        at = self._at
        if at.over or (at.begun and not self._continues):
            at = self._next_epoch(at)
        elif at.begun and self._random_state is not None:
            # The loader of the interrupted epoch had taken its seed from torch's generator before the checkpoint; the
            # new one has just taken another, which the run that was never interrupted did not.
            torch.set_rng_state(self._random_state)
        if not at.begun:
            at.deal = replace(at.deal, total=length_of(self._source))  # a dataset may have grown between epochs
        order = self._order(at.epoch)
        self._at, self._began = at, at.drawn
        kept = order if isinstance(order, list) else None  # a sampler is asked once an epoch
        return self._draw(at, self._indices(at, order), kept)

    def _next_epoch(self, at: Position) -> Position:
        fresh = self._beginning(at.epoch + 1, at.rank, at.size)
        fresh.deal = at.later.get(fresh.epoch, fresh.deal)
        fresh.later = {epoch: deal for epoch, deal in at.later.items() if epoch > fresh.epoch}
        fresh.changes, fresh.trained = at.changes, None if at.trained is None else 0
        return fresh

    def _draw(self, at: Position, indices: list[int], order: list[int] | None) -> Iterator[int]:
        place = at.drawn
        while True:
            now = self._at
            if now is not at and now.run is at.run:  # workers came or went
                at, place = now, now.drawn
                indices = self._indices(at, self._order(at.epoch) if order is None else order)
            if place >= len(indices):
                break
            self._continues, self._random_state = False, None  # not before: loaders ask for iterators they do not use
            if not self._counted_by_loader:
                at.drawn += 1
            yield indices[place]
            place += 1
        if not self._counted_by_loader:
            at.in_last_batch = False

    def _order(self, epoch: int) -> Tensor | list[int]:
        """What all ranks deal out in an epoch, in their common order."""
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
            # Not torch.manual_seed, which would reseed the GPUs as well.
            torch.default_generator.manual_seed(rng.address("shard", self._seed, epoch))
            return list(sampler)
        finally:
            torch.set_rng_state(before)

    def _indices(self, at: Position, order: Tensor | list[int]) -> list[int]:
        """All of this rank's indices under the newest deal, in order."""
        if self._own is not None:
            return self._shuffled(self._own.samples, at.epoch, self._own.rank).tolist()
        # A sampler may yield more or fewer than it said
        deal = at.deal if at.deal.drawn else replace(at.deal, total=len(order))
        if isinstance(order, list):
            return [order[entry] for entry in deal.entries().tolist() if entry < len(order)]
        if self._classes is None:
            return order[deal.entries()].tolist()

        # Dealt out class by class, then shuffled again: a rank would otherwise see its data in class order.
        def arranged(entries: Tensor, deals_before: int, place: int) -> Tensor:
            if not self._shuffle:
                return entries[order[entries].argsort()]
            return self._shuffled(entries, at.epoch, place, *([deals_before] if deals_before else []))

        return order[deal.entries(arranged)].tolist()

    def _shuffled(self, mine: Tensor, *address: int) -> Tensor:
        if not self._shuffle:
            return mine.sort().values
        own = rng.generator("shard", self._seed, *address)
        return mine[torch.randperm(len(mine), generator=own, device="cpu")]

    # -- positions that a loader counts, since its workers draw ahead --------------------------------------------------

    def let_loader_count(self) -> None:
        """From now on `take` and `finish` say how far training has come, and drawing does not."""
        self._counted_by_loader = self.tracked = True

    @property
    def changes(self) -> int:
        """How often workers came or went: by that a loader sees that it fetched for a deal that is no more."""
        return self._at.changes

    def go_on(self) -> None:
        """Let the next `iter` go on with the epoch under way."""
        self._continues = True

    @property
    def random_state(self) -> Tensor | None:
        """Of torch's generator, where the next `iter` goes on with an epoch of a checkpoint: as it was loaded."""
        return self._random_state if self._at.begun and not self._at.over else None

    @property
    def resumed(self) -> bool:
        """Whether the next `iter` is the first since a checkpoint was loaded."""
        return self._random_state is not None

    def take(self, count: int) -> None:
        """The loop was given the first `count` indices of the present iteration."""
        at = self._at
        drawn = min(self._began + count, at.deal.part)
        at.in_last_batch = drawn == at.deal.part  # first, or another thread would see an epoch that is over
        at.drawn = drawn

    def finish(self) -> None:
        """The loop was told that the epoch is over."""
        at = self._at
        at.drawn, at.in_last_batch = at.deal.part, False
        self._continues, self._random_state = False, None

    # -- checkpoints, and changes of the workers -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the position in it; with a loader that counts also whether the loop knows of the epoch's end,
        which it does not yet in its last batch. After changes within the epoch also what was drawn before each."""
        state = self._at.state(says_over=self._counted_by_loader)
        return state if self._own is None else self._own.noted(state)

    def note_trained(self) -> None:
        """A step was made together: what was drawn up to now is trained on, on every worker."""
        at = self._at
        at.trained = at.drawn

    def position(self) -> dict[str, Any]:
        """state_dict() for `regroup`: also how much was trained on, which tells where workers lost since then were."""
        trained = self._at.trained
        return self.state_dict() if trained is None else {**self.state_dict(), "trained": trained}

    def load_state_dict(self, state: State) -> None:
        """Go on where the saved state stood. Raises CheckpointError where it is none of this data."""
        rank, size = self._at.rank, self._at.size
        if self._own is not None:
            state = self._own.taken_up(state)
            rank, size = self._own.rank, self._own.size
        self._at = self._position(state, rank, size)
        self._continues, self._random_state = True, torch.get_rng_state()

    def _position(self, state: State, rank: int, size: int) -> Position:
        return Position.of(state, total=length_of(self._source), rank=rank, size=size)

    def regroup(self, rank: int, size: int, positions: Sequence[State | None], *, stayed: Sequence[int] = ()) -> None:
        """Workers came or went: go on as `rank` of `size`, with an equal part of what nobody has drawn in this epoch.

        positions: position() of all workers before, by their ranks then; of the lost as far as it is known, with
        `drawn` as trained on, or None: as if they had kept up with the others. stayed: the ranks that those had who
        stayed, in the order of their new ranks, which come first; the others are newcomers, who go on in the same
        epoch. Without it all are, as after a checkpoint. All workers give the same.

        An iterator under way takes its new part up at its next index, a newcomer's too. With non_iid those who stayed
        keep their samples, nobody has those of the lost, and those of a newcomer may be others' as well. Called while
        no index is drawn. Raises CheckpointError where the positions contradict each other.
        """
        before = self._at
        if self._own is not None:
            at = self._own.regrouped(before, positions, rank, stayed)
        else:
            count = len(positions)
            known = [None if each is None else self._position(each, old, count) for old, each in enumerate(positions)]
            everybody = supposed(known, total=length_of(self._source))
            at = regrouped(everybody, rank=rank, size=size, stayed=stayed)
        at.run, at.changes, at.trained = before.run, before.changes + 1, None if before.trained is None else at.drawn
        if at.epoch != before.epoch or (stayed and rank >= len(stayed)):
            self._continues, self._random_state = True, None
        self._at = at


def _workers_draw() -> bool:
    """Whether a DataLoader asks for an index to hand it to its workers; nothing else tells a sampler."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _BaseDataLoaderIter.__module__:  # others' locals are left alone
            return getattr(frame.f_locals.get("self"), "_num_workers", 0) > 0
        frame = frame.f_back
    return False
