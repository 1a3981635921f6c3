"""Tracked loaders: iterate over a DataLoader and count what the loop took, or restore what a loader says itself."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from gossamer.errors import AttachError
from gossamer.train.sampler import Shard, StreamShard


class TrackedLoader:
    """A DataLoader over a shard, of a dataset or of a stream; its position is what the loop was given.

    Everything else is the loader's own. A resumed run is given the batches that the interrupted one was not, with any
    number of workers, persistent or not. What a dataset draws at random in workers starts anew there: seed it by the
    index. Where workers of the group come or go, batches that were fetched ahead are dropped, and those of the new deal
    are fetched.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Raises AttachError where batches taken do not tell which indices they hold."""
        self._loader, self._shard = loader, _shard_of(loader)
        self._batch_size = loader.batch_size or 1

    def __iter__(self) -> Iterator[Any]:
        shard = self._shard
        shard.let_loader_count()  # not before: a loop may go on with the loader itself
        as_loaded, resumed, before = shard.random_state, shard.resumed, torch.get_rng_state()
        batches = self._begun()
        # A new iterator draws a seed, which the run that was never interrupted did not: in the middle of an epoch, and
        # where its workers persist.
        if as_loaded is not None:
            torch.set_rng_state(as_loaded)
        elif resumed and self._loader.persistent_workers:
            torch.set_rng_state(before)
        while (yield from self._taken(batches)):
            shard.go_on()
            before = torch.get_rng_state()
            batches = self._begun()
            torch.set_rng_state(before)
        shard.finish()

    def _begun(self) -> Iterator[Any]:
        self._shard.begin(self._batch_size)
        return iter(self._loader)

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


class RestoredLoader:
    """A loader that has state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader; all is its own.

    Its iterators draw seeds from torch's generator. That of an epoch under way has drawn them before the checkpoint, so
    whatever a restored one draws as it is made is taken back.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._restored = loader, False

    def __iter__(self) -> Iterator[Any]:
        if self._restored:
            before = torch.get_rng_state()
            self._loader.state_dict()  # makes the iterator that goes on
            torch.set_rng_state(before)
        self._restored = False
        return iter(self._loader)

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)
        self._restored = True

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _shard_of(loader: DataLoader[Any]) -> Shard | StreamShard[Any]:
    shard = loader.dataset if isinstance(loader.dataset, StreamShard) else _sampler_of(loader)
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise AttachError(
            "in_order=False hands out batches as workers finish them, so the number that was taken does not say which. "
            "Leave it out."
        )
    if isinstance(shard, StreamShard) and loader.persistent_workers:
        raise AttachError(
            "workers that persist keep the position in the stream at which they were started, so a resumed run would "
            "begin elsewhere. Leave persistent_workers out."
        )
    return shard


def _sampler_of(loader: DataLoader[Any]) -> Shard:
    if not isinstance(loader.sampler, Shard):
        raise AttachError(
            "this loader draws from a sampler or batch sampler of its own, so the number of batches that were taken "
            "does not say where it stands. Write DataLoader(dataset, batch_size=..., sampler=world.shard(dataset)), or "
            "give session.track a loader that has state_dict(), such as torchdata's StatefulDataLoader."
        )
    return loader.sampler
