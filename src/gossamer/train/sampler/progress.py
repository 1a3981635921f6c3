"""Sampler progress: counts the draws of a shard, stores them in checkpoints, and follows changes of the workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.comm import environment
from gossamer.train.sampler.position import Position, Regrouping, State, dealt_among, regrouped, supposed

COMEBACK_EPOCHS = 10**6  # more than any run has, so that a returning worker draws in a new order


class WorldShard(Protocol):
    """Interface of a world's shards."""

    tracked: bool  # whether a loader stores the position, although its workers draw ahead

    @property
    def drawn_ahead(self) -> bool:
        """Whether workers of a loader draw."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...
    def note_trained(self) -> None: ...
    def follows_speed(self, rank: int, size: int) -> bool:
        """Whether its parts may be unequal, and it belongs to `rank` of `size`."""

    def regroup(self, positions: Sequence[State | None], change: Regrouping) -> None: ...
    def mark(self) -> Any:
        """The current position, for `rewind` and `state_at`."""

    def rewind(self, mark: Any, /) -> None:
        """Return to a marked position. Draws of existing iterators are not counted any more."""

    def state_at(self, mark: Any, /) -> dict[str, Any]:
        """state_dict() at a marked position."""

    @property
    def entered(self) -> int:
        """The newest epoch with draws, or -1."""

    def finish_through(self, epoch: int, /) -> None:
        """Let the next iteration begin the epoch after `epoch`, which another rank has entered."""

    @property
    def lap(self) -> int | None:
        """This rank's position in half epochs; None if ranks at different positions cannot draw the same samples."""


class ShardProgress:
    """A rank's progress in its part of the data."""

    def __init__(self, rank: int, size: int) -> None:
        self._continues = True  # whether the next `iter` continues an epoch that was begun
        self._random_state: Tensor | None = None  # of torch's generator when a checkpoint was loaded
        self._began = 0  # position at the beginning of the current iteration
        self._counted_by_loader = False
        self._least_epoch = 0  # of the next iteration that begins an epoch: see set_epoch
        self.tracked = False  # whether a loader stores the position, although its workers draw ahead
        # Replaced as one reference, since a change of the workers is applied on another thread
        self._at = self._beginning(COMEBACK_EPOCHS * environment.data_order(), rank, size)

    def _total(self) -> int:
        """Number of entries of an epoch."""
        raise NotImplementedError

    def _beginning(self, epoch: int, rank: int, size: int, widths: tuple[int, ...] = ()) -> Position:
        deal = dealt_among(range(size), rank, widths, total=self._total())
        return Position(rank=rank, size=size, epoch=epoch, deal=deal, widths=widths)

    @property
    def rank(self) -> int:
        """Owner of this part; with non_iid, the rank in the split of the samples."""
        return self._at.rank

    @property
    def epoch(self) -> int:
        """The current epoch, or the last one."""
        return self._at.epoch

    @property
    def drawn(self) -> int:
        """Number of entries drawn in this epoch; after a change of the workers, since that change."""
        return self._at.drawn

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin `epoch` if it would begin an earlier one. A loop may omit this call of torch's
        `DistributedSampler`, because iterations count epochs. An epoch that a checkpoint has interrupted is completed
        first, and no epoch is repeated.

        Args:
            epoch: number of the epoch, from 0; equal on all ranks.
        """
        self._least_epoch = epoch

    def _entered(self) -> Position:
        """The position of a new iteration: in the current epoch or at the beginning of the next one."""
        at = self._at
        following = at.epoch + 1 if at.over or (at.begun and not self._continues) else at.epoch
        if not at.begun or following > at.epoch:
            following = max(following, self._least_epoch)
        if following > at.epoch:
            return self._epoch_after(at, following)
        if at.begun and self._random_state is not None:
            # The loader of the interrupted epoch had taken its seed from torch's generator before the checkpoint; the
            # new loader has just taken another one, which an uninterrupted run would not have done.
            torch.set_rng_state(self._random_state)
        return at

    def _epoch_after(self, at: Position, epoch: int) -> Position:
        """The beginning of `epoch`, a later one than that of `at`."""
        fresh = self._beginning(epoch, at.rank, at.size, at.widths)
        fresh.deal = at.later.get(fresh.epoch, fresh.deal)
        fresh.later = {epoch: deal for epoch, deal in at.later.items() if epoch > fresh.epoch}
        fresh.changes, fresh.trained = at.changes, None if at.trained is None else 0
        return fresh

    # -- positions that a loader counts, since its workers draw ahead --------------------------------------------------

    def let_loader_count(self) -> None:
        """From now on `take` and `finish` report the progress of training, and draws are not counted."""
        self._counted_by_loader = self.tracked = True

    def begin(self, batch_size: int) -> None:
        """Called before a counting loader makes an iterator, with batches of `batch_size` entries."""

    @property
    def changes(self) -> int:
        """Number of changes of the workers; a loader compares it to detect that prefetched entries are outdated."""
        return self._at.changes

    def go_on(self) -> None:
        """Let the next `iter` continue the current epoch."""
        self._continues = True

    @property
    def random_state(self) -> Tensor | None:
        """State of torch's generator from a loaded checkpoint, if the next `iter` continues that epoch."""
        return self._random_state if self._at.begun and not self._at.over else None

    @property
    def resumed(self) -> bool:
        """Whether the next `iter` is the first one since a checkpoint was loaded."""
        return self._random_state is not None

    def take(self, count: int) -> None:
        """Record that the loop has received the first `count` entries of the current iteration."""
        at = self._at
        drawn = min(self._began + count, at.deal.part)
        at.in_last_batch = drawn == at.deal.part  # first; otherwise another thread could see an epoch that is over
        at.drawn = drawn

    def finish(self) -> None:
        """Record that the loop has ended the epoch."""
        at = self._at
        at.drawn, at.in_last_batch = at.deal.part, False
        self._continues, self._random_state = False, None

    # -- positions that all ranks agree on, in session.epoch() ---------------------------------------------------------

    def mark(self) -> tuple[Position, bool, Tensor | None]:
        return self._copied(self._at), self._continues, self._random_state

    def rewind(self, mark: tuple[Position, bool, Tensor | None]) -> None:
        noted = self._at.trained is not None
        at, self._continues, self._random_state = mark
        self._at = self._copied(at)  # the mark is not modified
        if noted:
            self.note_trained()

    def state_at(self, mark: tuple[Position, bool, Tensor | None]) -> dict[str, Any]:
        at, self._at = self._at, mark[0]
        try:
            return self.state_dict()
        finally:
            self._at = at

    @staticmethod
    def _copied(at: Position) -> Position:
        return replace(at, run=object())  # no existing iterator follows it

    @property
    def entered(self) -> int:
        at = self._at
        return at.epoch if at.begun or at.over else at.epoch - 1

    def finish_through(self, epoch: int) -> None:
        if self.entered < epoch:
            self._at = self._at if self._at.epoch == epoch else self._epoch_after(self._at, epoch)
            self.finish()

    @property
    def lap(self) -> int | None:
        return None

    # -- checkpoints, and changes of the workers -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the position in it. With a counting loader it includes whether the loop has ended the epoch;
        after changes of the workers within the epoch, also the draws before each; and the number of samples trained on,
        if it is known and is not the number of draws."""
        return self._at.state(marks_end=self._counted_by_loader)

    def note_trained(self) -> None:
        """Record that all workers have trained on the samples drawn so far. `regroup` estimates the draws of a lost
        worker from it."""
        at = self._at
        at.trained = at.drawn

    def follows_speed(self, rank: int, size: int) -> bool:
        return (self._at.rank, self._at.size) == (rank, size)

    def load_state_dict(self, state: State) -> None:
        """Continue from a saved state. Raises CheckpointError if it does not fit this data."""
        self._take_up(self._position(state, self._at.rank, self._at.size))

    def _take_up(self, at: Position) -> None:
        self._at, self._continues, self._random_state = at, True, torch.get_rng_state()

    def _position(self, state: State, rank: int, size: int) -> Position:
        return Position.of(state, total=self._total(), rank=rank, size=size)

    def regroup(self, positions: Sequence[State | None], change: Regrouping) -> None:
        """Continue after a change of the workers or of their shares, with a part of the epoch's rest.

        An active iterator follows at its next entry, also on new workers. With non_iid, remaining workers keep their
        samples, those of lost workers are dropped, and those of new workers may be used by others as well. Call it
        while no entry is being drawn, with the same arguments on all workers.

        Args:
            positions: state_dict() of all workers before the change, by rank; for a lost worker the last known one, or
                None: it is then assumed to have kept up with the others.
            change: the workers and their shares. Shares are equal if an epoch has fewer entries than the sum of
                `widths`, since some would have none.

        Raises:
            CheckpointError: the positions contradict each other.
        """
        before, stayed = self._at, change.stayed
        if sum(change.widths) > self._total():
            change = change._replace(widths=())
        at = self._regrouped(positions, change)
        at.run, at.changes, at.trained = before.run, before.changes + 1, None if before.trained is None else at.drawn
        if at.epoch != before.epoch or (stayed and change.rank >= len(stayed)):
            self._continues, self._random_state = True, None
        self._at = at

    def _regrouped(self, positions: Sequence[State | None], change: Regrouping) -> Position:
        count = len(positions)
        known = [None if each is None else self._position(each, old, count) for old, each in enumerate(positions)]
        return regrouped(supposed(known, total=self._total()), change)


# -- draws outside of session.epoch() that were not trained on ---------------------------------------------------------

# A rank that looks at a batch, or measures the accuracy on training data, draws from its shard while the others do not.
# Its next epoch would otherwise have another number, and another shuffle, than theirs.


class EpochMarks:
    """Positions of shards at the end of the last session.epoch() block, or at the beginning of the first one."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[WorldShard, Any] = weakref.WeakKeyDictionary()
        self._begins: weakref.WeakKeyDictionary[WorldShard, Any] = weakref.WeakKeyDictionary()  # marks before moves
        self._new: weakref.WeakSet[WorldShard] = weakref.WeakSet()  # with their beginning as the mark
        self._progress: list[Callable[[], object]] = []  # by session: the value changes with each training step
        self._within, self._used = False, False  # whether session.epoch() is active, and whether it ever was
        self._marked_at = self._now()

    def _now(self) -> list[object]:
        return [progress() for progress in self._progress]

    @property
    def aside(self) -> bool:
        """Whether draws since the marks count for no epoch: outside of session.epoch(), without a step since then."""
        return bool(self._progress) and not self._within and self._marked_at == self._now()

    def watch(self, progress: Callable[[], object]) -> None:
        """Register an attached session. progress: returns a value that changes with each of its steps."""
        unmoved = self._marked_at == self._now()
        self._progress.append(progress)
        if unmoved:
            self._marked_at = self._now()

    def add(self, shard: WorldShard) -> None:
        """Register a new shard, with its beginning as the mark."""
        self._marks[shard] = self._begins[shard] = shard.mark()
        self._new.add(shard)

    def trained(self, shard: WorldShard) -> State | None:
        """The shard's state after its draws that count, if there are any; else None."""
        marked = shard.state_at(self._marks[shard])
        untrained = self.aside or not self._progress  # without a session nothing was trained on
        state = marked if untrained else shard.state_dict()
        return None if shard in self._new and state == marked else state

    def set(self, shards: Iterable[WorldShard], *, moved: bool = False) -> None:
        """Set the marks. From here, draws count only if they are trained on or within session.epoch().

        Args:
            moved: whether it was a change of the workers that has modified the positions, and not draws.
        """
        for shard in shards:
            self._marks[shard] = shard.mark()
            self._new.discard(shard)
            if not moved:
                self._begins[shard] = self._marks[shard]
        self._marked_at = self._now()

    def rewind(self, shards: Iterable[WorldShard]) -> None:
        """Undo draws that do not count."""
        if self.aside:
            for shard in shards:
                shard.rewind(self._marks[shard])

    def enter(self, shards: Iterable[WorldShard]) -> None:
        """Called when session.epoch() begins."""
        self.rewind(shards)
        self._within = True

    def leave(self, shards: Iterable[WorldShard]) -> None:
        """Called when session.epoch() ends."""
        self._within, self._used = False, True
        self.set(shards)

    def drawn(self, shard: WorldShard) -> bool:
        """Whether entries of the shard were drawn in this session.epoch() block; without such a block, ever."""
        return shard.state_at(self._begins[shard]) != shard.state_dict()

    def states(self, shards: Iterable[WorldShard]) -> list[dict[str, Any]]:
        """Positions for a checkpoint, without draws that do not count. Without session.epoch() all draws count."""
        if not self._used or not self.aside:
            return [shard.state_dict() for shard in shards]
        return [shard.state_at(self._marks[shard]) for shard in shards]
