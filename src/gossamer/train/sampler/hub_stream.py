"""Hugging Face stream: reads this rank's shards of a datasets.IterableDataset, and keeps its own state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from gossamer.errors import CheckpointError
from gossamer.train.sampler.position import State


def is_hub_stream(source: object) -> bool:
    """Whether it is a datasets.IterableDataset; the library is not imported for that."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(source, library.IterableDataset)


class HubStreamShard(IterableDataset[Any]):
    """This rank's part of a datasets.IterableDataset, split by `split_dataset_by_node`: whole shards, that is files,
    where their number is a multiple of the ranks', else every `size`-th example. Each `iter` is an epoch, which
    `set_epoch` is told of: a dataset that was shuffled is in another order.

    The workers of a DataLoader share this rank's shards. Drawn in this process, its position is in checkpoints; drawn
    in workers it is in that of torchdata's StatefulDataLoader. Either is one rank's of so many.
    """

    def __init__(self, source: Any, *, rank: int, size: int) -> None:
        from datasets.distributed import split_dataset_by_node

        self._rank, self._size = rank, size
        self._dataset = split_dataset_by_node(source, rank=rank, world_size=size)
        self._epoch, self._begun, self._over, self._continues = 0, False, False, True
        self._loaded: Any = None  # the dataset's state, until it yields the next example
        self._random_state: Tensor | None = None
        self._workers_drew = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()
        self.tracked = False  # whether a loader knows its own position

    @property
    def drawn_ahead(self) -> bool:
        """Whether workers of a loader have drawn."""
        return bool(self._workers_drew)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            self._workers_drew.fill_(True)
        elif self._over or (self._begun and not self._continues):
            self._epoch, self._begun, self._over = self._epoch + 1, False, False
        elif self._begun and self._random_state is not None:
            torch.set_rng_state(self._random_state)  # a loader has just drawn a seed from it: see ShardProgress
        return self._drawn()

    def _drawn(self) -> Iterator[Any]:
        self._dataset.set_epoch(self._epoch)
        for item in self._dataset:
            self._begun, self._continues, self._random_state, self._loaded = True, False, None, None
            yield item
        self._over = get_worker_info() is None

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the dataset's own state: the last example that it yielded here."""
        return {
            "epoch": self._epoch,
            "begun": self._begun,
            "over": self._over,
            "source": self._loaded if self._continues or self._loaded else self._dataset.state_dict(),
            "own": [self._rank, self._size],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the saved state stood. Raises CheckpointError where it is another rank's, or of other data."""
        if list(state.get("own", ())) != [self._rank, self._size] or "source" not in state:
            raise CheckpointError(
                f"{dict(state)!r} is no position of rank {self._rank} of {self._size} in shards of a Hugging Face "
                "dataset, so nobody knows what was drawn already. Start as many workers as wrote the checkpoint."
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
        """Nothing: the position of a lost worker is of no use to others."""

    def position(self) -> dict[str, Any]:
        return self.state_dict()

    def regroup(self, rank: int, size: int, positions: Sequence[State | None], *, stayed: Sequence[int] = ()) -> None:
        """Raises CheckpointError: files that are half read cannot be dealt out anew."""
        raise CheckpointError(
            f"workers came or went, and what is left of a Hugging Face stream that {self._size} read by shards cannot "
            "be dealt out anew. Give world.shard a torch.utils.data.IterableDataset of your own, whose __iter__ yields "
            "from the dataset: its items are counted."
        )
