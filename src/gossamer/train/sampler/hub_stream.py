"""Hugging Face stream: reads this rank's shards of a datasets.IterableDataset, and stores the dataset's state."""

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
            self._epoch, self._begun, self._over = self._epoch + 1, False, False
        elif self._begun and self._random_state is not None:
            torch.set_rng_state(self._random_state)  # a loader has just drawn a seed: see ShardProgress
        return self._drawn()

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

    def position(self) -> dict[str, Any]:
        return self.state_dict()

    def follows_speed(self, rank: int, size: int) -> bool:
        return False

    def regroup(
        self,
        rank: int,
        size: int,
        positions: Sequence[State | None],
        *,
        stayed: Sequence[int] = (),
        widths: Sequence[int] = (),
    ) -> None:
        """Raises CheckpointError: partly read files cannot be divided again."""
        raise CheckpointError(
            f"workers joined or left, but the rest of a Hugging Face stream that {self._size} ranks read by shards "
            "cannot be divided again. Pass world.shard a torch.utils.data.IterableDataset with an __iter__ that yields "
            "from the dataset: its items are counted."
        )
