"""Tracked loader: iterates over a DataLoader and counts what the loop took, not what its workers fetched ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from gossamer.errors import AttachError
from gossamer.sampler import Shard


class TrackedLoader:
    """A DataLoader over a shard whose position is what the loop was given; everything else is the loader's own.

    A resumed run is given the batches that the interrupted one was not, with any number of workers, persistent or not.
    What a dataset draws at random in workers starts anew there: seed it by the index. Where workers of the group come
    or go, batches that were fetched ahead are dropped, and those of the new deal are fetched.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Raises AttachError where batches taken do not tell which indices they hold."""
        self._loader, self._shard = loader, _shard_of(loader)
        self._batch_size = loader.batch_size or 1

    def __iter__(self) -> Iterator[Any]:
        shard = self._shard
        shard.let_loader_count()  # not before: a loop may go on with the loader itself
        as_loaded, resumed, before = shard.random_state, shard.resumed, torch.get_rng_state()
        batches = iter(self._loader)
        # A new iterator draws a seed, which the run that was never interrupted did not: in the middle of an epoch, and
        # where its workers persist.
        if as_loaded is not None:
            torch.set_rng_state(as_loaded)
        elif resumed and self._loader.persistent_workers:
            torch.set_rng_state(before)
        while (yield from self._taken(batches)):
            shard.go_on()
            before = torch.get_rng_state()
            batches = iter(self._loader)
            torch.set_rng_state(before)
        shard.finish()

    def _taken(self, batches: Iterator[Any]) -> Generator[Any, None, bool]:
        """Batches until they end, or until workers came or went: then true. What was fetched ahead under the deal
        before and not taken belongs to whoever has it now."""
        shard, changes = self._shard, self._shard.changes
        for count, batch in enumerate(batches, 1):
            if shard.changes != changes:  # while this batch was fetched
                break
            shard.take(count * self._batch_size)
            yield batch
            if shard.changes != changes:
                break
        return shard.changes != changes

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _shard_of(loader: DataLoader[Any]) -> Shard:
    inner = loader.batch_sampler
    batched = isinstance(inner, BatchSampler) and type(inner).__iter__ is BatchSampler.__iter__
    if not isinstance(loader.sampler, Shard) or not (batched or inner is None):
        raise AttachError(
            "this loader draws from a sampler or batch sampler of its own, so the number of batches that were taken "
            "does not say where it stands. Write DataLoader(dataset, batch_size=..., sampler=world.shard(dataset)), or "
            "give session.track a loader that has state_dict(), such as torchdata's StatefulDataLoader."
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise AttachError(
            "in_order=False hands out batches as workers finish them, so the number that was taken does not say which. "
            "Leave it out."
        )
    return loader.sampler
