"""Stream shard: divides an iterable dataset of unknown length among ranks and the workers of their loaders."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from gossamer.errors import CheckpointError
from gossamer.train.sampler.deal import NO_PLACE, Even, left_of, part_of
from gossamer.train.sampler.position import UNKNOWN_TOTAL, Position, Regrouping, State
from gossamer.train.sampler.progress import ShardProgress

Item = TypeVar("Item", covariant=True)


class StreamShard(ShardProgress, IterableDataset[Item]):
    """This rank's items of a stream, every `size`-th one: disjoint from those of other ranks, together covering. Under
    strategies with balance=True the parts follow the ranks' speeds.

    The source is an iterable dataset that yields the same items in every process and in every `iter`. Every rank, and
    every worker of its DataLoader, reads the whole stream and keeps its own items. Each `iter` is an epoch; a source
    with `set_epoch` receives its number.

    Positions count items, so another number of workers can continue, also within a run: see Shard. To continue, the
    source is read again from its beginning up to the position. Workers of a DataLoader draw in separate processes, so
    their progress is unknown here: `session.track(loader)` counts the items that the loop received. Its batches are the
    same for every number of loader workers.

    Args:
        source: the iterable dataset.
        rank, size: this rank, and the number of ranks.
        even: None: numbers of items differ by at most one between ranks; "drop": leave out an incomplete last row;
            "pad": repeat its first item.
    """

    def __init__(self, source: IterableDataset[Item], *, rank: int, size: int, even: Even | None = None) -> None:
        if even not in (None, "drop", "pad"):
            raise ValueError(
                f"even must be 'drop', 'pad' or None, got {even!r}. even='drop' leaves out the last items, even='pad' "
                "repeats one, so that all ranks have the same number."
            )
        super().__init__(rank, size)
        self._source, self._even = source, even
        self._batch_size = 1
        self._worker: Any = None  # the loader worker of this process
        self._workers_drew = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()

    def _total(self) -> int:
        return UNKNOWN_TOTAL

    @property
    def drawn_ahead(self) -> bool:
        """Whether workers of a loader have drawn."""
        return bool(self._workers_drew)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def begin(self, batch_size: int) -> None:
        self._at, self._batch_size = self._entered(), batch_size
        self._began = self._at.drawn

    def __iter__(self) -> Iterator[Item]:
        # A source that splits itself by get_worker_info() would be split twice, and lose most items.
        worker = self._worker = self._worker or get_worker_info()
        loader_worker._worker_info = None
        if worker is None:
            if not self._counted_by_loader:
                self.begin(1)
            return self._drawn_here()
        self._workers_drew.fill_(True)
        if not self._counted_by_loader:
            self._random_state = None  # a worker has its own generator
            self.begin(1)
        return self._drawn_by(worker.id, worker.num_workers)

    def _drawn_here(self) -> Iterator[Item]:
        at, began = self._at, self._began
        while True:
            for item in self._from(at, began):
                if self._moved(at):
                    break
                self._continues, self._random_state = False, None
                if not self._counted_by_loader:
                    at.drawn += 1
                yield item
            if not self._moved(at):
                break
            at, began = self._at, self._at.drawn
        if not self._counted_by_loader:
            self.finish()

    def _moved(self, at: Position) -> bool:
        """Whether workers joined or left since."""
        return self._at is not at and self._at.run is at.run

    def _drawn_by(self, worker: int, workers: int) -> Iterator[Item]:
        """This rank's batches number worker, worker + workers, ...: a loader reads from its workers in turn."""
        for number, item in enumerate(self._from(self._at, self._began)):
            if number // self._batch_size % workers == worker:
                self._continues = False
                yield item
        if not self._counted_by_loader:
            self.finish()  # for persistent workers

    def _from(self, at: Position, drawn: int) -> Iterator[Item]:
        """This rank's items under its newest deal, without the first `drawn`."""
        if at.deal.place == NO_PLACE:
            return iter(())
        if set_epoch := getattr(self._source, "set_epoch", None):
            set_epoch(at.epoch)
        left = left_of(self._source, at.deal.drawn)
        part = part_of(left, at.deal.place, at.deal.places, self._even, width=at.deal.width)
        return (item for number, item in enumerate(part) if number >= drawn)

    # -- positions -----------------------------------------------------------------------------------------------------

    def take(self, count: int) -> None:
        self._continues, self._random_state = False, None
        super().take(count)

    def finish(self) -> None:
        """Record that the loop has ended the epoch, which determines the number of its items."""
        at = self._at
        if at.deal.place != NO_PLACE:
            rows, rest = divmod(at.drawn, at.deal.width)
            left = rows * at.deal.places + (at.deal.place + rest if rest else 0)
            at.deal = replace(at.deal, total=sum(map(sum, at.deal.drawn)) + left)
        super().finish()

    def state_dict(self) -> dict[str, Any]:
        """As Shard.state_dict(); after the epoch also its number of items, as far as this rank knows."""
        at = self._at
        total = at.deal.total
        return {**at.state(marks_end=True), "total": None if total == UNKNOWN_TOTAL else total}

    def _position(self, state: State, rank: int, size: int) -> Position:
        if "total" not in state:
            raise CheckpointError(
                f"{dict(state)!r} is not a position in a stream, so the samples drawn so far are unknown. Make the "
                "same calls of world.shard, in the same order, before loading."
            )
        at = Position.of(state, total=UNKNOWN_TOTAL, rank=rank, size=size)
        if state["total"] is not None:
            at.deal = replace(at.deal, total=int(state["total"]))
        return at


# -- streams of Hugging Face: a datasets.IterableDataset, which stores its own state -----------------------------------


def is_hub_stream(source: object) -> bool:
    """Whether it is a datasets.IterableDataset, without importing that library."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(source, library.IterableDataset)


class HubStreamShard(IterableDataset[Any]):
    """This rank's part of a datasets.IterableDataset, split by `split_dataset_by_node`: whole shards (files) if their
    number is a multiple of the number of ranks, otherwise every `size`-th example. Each `iter` is an epoch, passed to
    `set_epoch`, which changes the order of a shuffled dataset.

    The workers of a DataLoader divide this rank's shards. If the main process draws, checkpoints contain the position;
    if loader workers draw, use torchdata's StatefulDataLoader, which stores it. A position is valid only for the same
    rank and number of ranks.
    """

    def __init__(self, source: Any, *, rank: int, size: int) -> None:
        from datasets.distributed import split_dataset_by_node

        self._rank, self._size = rank, size
        self._dataset = split_dataset_by_node(source, rank=rank, world_size=size)
        self._epoch, self._begun, self._over, self._continues = 0, False, False, True
        self._least_epoch = 0
        self._loaded: Any = None  # a loaded state of the dataset, until it yields the next example
        self._random_state: Tensor | None = None
        self._workers_drew = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()
        self.tracked = False  # whether a loader stores the position

    @property
    def drawn_ahead(self) -> bool:
        """Whether workers of a loader have drawn."""
        return bool(self._workers_drew)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            self._workers_drew.fill_(True)
        elif self._over or (self._begun and not self._continues):
            self._epoch, self._begun, self._over = max(self._epoch + 1, self._least_epoch), False, False
        elif not self._begun:
            self._epoch = max(self._epoch, self._least_epoch)
        elif self._begun and self._random_state is not None:
            torch.set_rng_state(self._random_state)  # a loader has just drawn a seed: see ShardProgress
        return self._drawn()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin `epoch` if it would begin an earlier one, as ShardProgress.set_epoch does."""
        self._least_epoch = epoch

    def _drawn(self) -> Iterator[Any]:
        self._dataset.set_epoch(self._epoch)
        for item in self._dataset:
            self._begun, self._continues, self._random_state, self._loaded = True, False, None, None
            yield item
        self._over = get_worker_info() is None

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the dataset's own state after the last example yielded here."""
        return {
            "epoch": self._epoch,
            "begun": self._begun,
            "over": self._over,
            "source": self._loaded if self._continues or self._loaded else self._dataset.state_dict(),
            "own": [self._rank, self._size],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a saved state. Raises CheckpointError if it is of another rank or dataset."""
        if list(state.get("own", ())) != [self._rank, self._size] or "source" not in state:
            raise CheckpointError(
                f"{dict(state)!r} is not a position of rank {self._rank} of {self._size} in shards of a Hugging Face "
                "dataset, so the samples drawn so far are unknown. Use the number of workers that wrote the checkpoint."
            )
        self._epoch, self._begun, self._over = state["epoch"], state["begun"], state["over"]
        self._loaded, self._continues, self._random_state = state["source"], True, torch.get_rng_state()
        self._dataset.load_state_dict(self._loaded)

    def mark(self) -> tuple[dict[str, Any], bool, Tensor | None]:
        return self.state_dict(), self._continues, self._random_state

    def rewind(self, mark: tuple[dict[str, Any], bool, Tensor | None]) -> None:
        self.load_state_dict(mark[0])
        _, self._continues, self._random_state = mark

    def state_at(self, mark: tuple[dict[str, Any], bool, Tensor | None]) -> dict[str, Any]:
        return mark[0]

    @property
    def entered(self) -> int:
        return self._epoch if self._begun else self._epoch - 1

    def finish_through(self, epoch: int) -> None:
        if self.entered < epoch:
            self._epoch, self._begun, self._over, self._continues = epoch, True, True, False

    @property
    def lap(self) -> int | None:
        return None

    def note_trained(self) -> None:
        """Nothing: the position of a lost worker cannot be used by others."""

    def follows_speed(self, rank: int, size: int) -> bool:
        return False

    def regroup(self, positions: Sequence[State | None], change: Regrouping) -> None:
        """Raises CheckpointError: partly read files cannot be divided again."""
        raise CheckpointError(
            f"workers joined or left, but the rest of a Hugging Face stream that {self._size} ranks read by shards "
            "cannot be divided again. Pass world.shard a torch.utils.data.IterableDataset with an __iter__ that yields "
            "from the dataset: its items are counted."
        )
