"""Sampler progress: counts what of a shard was drawn, puts it in checkpoints, and follows workers that come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.comm import environment
from gossamer.train.sampler.deal import Deal
from gossamer.train.sampler.position import Position, State, regrouped, supposed

COMEBACK_EPOCHS = 10**6  # more than any run makes, so that a worker that comes back draws in a new order


class WorldShard(Protocol):
    """What a world asks of each of its shards."""

    tracked: bool  # whether a loader knows its own position, however far its workers draw ahead

    @property
    def drawn_ahead(self) -> bool:
        """Whether workers of a loader draw."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...
    def note_trained(self) -> None: ...
    def position(self) -> dict[str, Any]: ...
    def regroup(
        self, rank: int, size: int, positions: Sequence[State | None], *, stayed: Sequence[int] = ()
    ) -> None: ...
    def mark(self) -> Any:
        """The present position, for `rewind` and `state_at`."""

    def rewind(self, mark: Any, /) -> None:
        """Return to a marked position. Iterators that exist draw on without being counted."""

    def state_at(self, mark: Any, /) -> dict[str, Any]:
        """state_dict() at a marked position."""

    @property
    def entered(self) -> int:
        """The newest epoch of which something was drawn, or -1."""

    def finish_through(self, epoch: int, /) -> None:
        """Let the next iteration begin the epoch after `epoch`, which another rank has entered."""

    @property
    def lap(self) -> int | None:
        """The position of this rank in half epochs, where ranks at different positions would draw the same samples."""


class ShardProgress:
    """How far a rank has come in its part of the data, whatever it is a part of."""

    def __init__(self, rank: int, size: int) -> None:
        self._continues = True  # whether the next `iter` goes on with an epoch that was begun
        self._random_state: Tensor | None = None  # of torch's generator as a checkpoint was loaded
        self._began = 0  # the position at which the present iteration began
        self._counted_by_loader = False
        self.tracked = False  # whether a loader knows its own position, however far its workers draw ahead
        # One reference, which another thread than the one that draws replaces where workers come and go
        self._at = self._beginning(COMEBACK_EPOCHS * environment.comebacks(), rank, size)

    def _total(self) -> int:
        """Entries of an epoch."""
        raise NotImplementedError

    def _beginning(self, epoch: int, rank: int, size: int) -> Position:
        deal = Deal(total=self._total(), place=rank, places=size)
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
        """How many entries were drawn in this epoch; after a change of the workers, since the last one."""
        return self._at.drawn

    def _entered(self) -> Position:
        """Where an iteration begins: in the next epoch, or in the one under way."""
        at = self._at
        if at.over or (at.begun and not self._continues):
            return self._next_epoch(at)
        if at.begun and self._random_state is not None:
            # The loader of the interrupted epoch had taken its seed from torch's generator before the checkpoint; the
            # new one has just taken another, which the run that was never interrupted did not.
            torch.set_rng_state(self._random_state)
        return at

    def _next_epoch(self, at: Position) -> Position:
        return self._epoch_after(at, at.epoch + 1)

    def _epoch_after(self, at: Position, epoch: int) -> Position:
        """The beginning of `epoch`, which comes after the one of `at`."""
        fresh = self._beginning(epoch, at.rank, at.size)
        fresh.deal = at.later.get(fresh.epoch, fresh.deal)
        fresh.later = {epoch: deal for epoch, deal in at.later.items() if epoch > fresh.epoch}
        fresh.changes, fresh.trained = at.changes, None if at.trained is None else 0
        return fresh

    # -- positions that a loader counts, since its workers draw ahead --------------------------------------------------

    def let_loader_count(self) -> None:
        """From now on `take` and `finish` say how far training has come, and drawing does not."""
        self._counted_by_loader = self.tracked = True

    def begin(self, batch_size: int) -> None:
        """A loader that counts is about to make an iterator, of batches of so many entries."""

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
        """The loop was given the first `count` entries of the present iteration."""
        at = self._at
        drawn = min(self._began + count, at.deal.part)
        at.in_last_batch = drawn == at.deal.part  # first, or another thread would see an epoch that is over
        at.drawn = drawn

    def finish(self) -> None:
        """The loop was told that the epoch is over."""
        at = self._at
        at.drawn, at.in_last_batch = at.deal.part, False
        self._continues, self._random_state = False, None

    # -- what all ranks agree on, by session.epoch() -------------------------------------------------------------------

    def mark(self) -> tuple[Position, bool, Tensor | None]:
        return self._copied(self._at), self._continues, self._random_state

    def rewind(self, mark: tuple[Position, bool, Tensor | None]) -> None:
        at, self._continues, self._random_state = mark
        self._at = self._copied(at)  # the mark stays as it is

    def state_at(self, mark: tuple[Position, bool, Tensor | None]) -> dict[str, Any]:
        at, self._at = self._at, mark[0]
        try:
            return self.state_dict()
        finally:
            self._at = at

    @staticmethod
    def _copied(at: Position) -> Position:
        return replace(at, run=object())  # of no iterator that exists

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
        """The epoch and the position in it; with a loader that counts also whether the loop knows of the epoch's end,
        which it does not yet in its last batch. After changes within the epoch also what was drawn before each."""
        return self._at.state(says_over=self._counted_by_loader)

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
        self._take_up(self._position(state, self._at.rank, self._at.size))

    def _take_up(self, at: Position) -> None:
        self._at, self._continues, self._random_state = at, True, torch.get_rng_state()

    def _position(self, state: State, rank: int, size: int) -> Position:
        return Position.of(state, total=self._total(), rank=rank, size=size)

    def regroup(self, rank: int, size: int, positions: Sequence[State | None], *, stayed: Sequence[int] = ()) -> None:
        """Workers came or went: go on as `rank` of `size`, with an equal part of what nobody has drawn in this epoch.

        positions: position() of all workers before, by their ranks then; of the lost as far as it is known, with
        `drawn` as trained on, or None: as if they had kept up with the others. stayed: the ranks that those had who
        stayed, in the order of their new ranks, which come first; the others are newcomers, who go on in the same
        epoch. Without it all are, as after a checkpoint. All workers give the same.

        An iterator under way takes its new part up at its next entry, a newcomer's too. With non_iid those who stayed
        keep their samples, nobody has those of the lost, and those of a newcomer may be others' as well. Called while
        no entry is drawn. Raises CheckpointError where the positions contradict each other.
        """
        before = self._at
        at = self._regrouped(rank, size, positions, stayed)
        at.run, at.changes, at.trained = before.run, before.changes + 1, None if before.trained is None else at.drawn
        if at.epoch != before.epoch or (stayed and rank >= len(stayed)):
            self._continues, self._random_state = True, None
        self._at = at

    def _regrouped(self, rank: int, size: int, positions: Sequence[State | None], stayed: Sequence[int]) -> Position:
        count = len(positions)
        known = [None if each is None else self._position(each, old, count) for old, each in enumerate(positions)]
        return regrouped(supposed(known, total=self._total()), rank=rank, size=size, stayed=stayed)
