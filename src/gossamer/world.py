"""Where this worker stands, and which part of the data is its own."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from gossamer import environment
from gossamer.core import rng
from gossamer.errors import CheckpointError

Labels = Iterable[Hashable] | Tensor
# So many epochs nobody makes, so whoever comes back draws in an order that was not drawn before
COMEBACK_EPOCHS = 10**6


class Shard(Sampler[int]):
    """This rank's indices: disjoint from the others', together covering all, sizes differing by at most one.

    Every rank works them out from (seed, epoch, rank, size) alone. Each `iter` starts the next epoch,
    reshuffled; the first is epoch 0. After `load_state_dict` the next `iter` goes on where the saved one
    stood, so an epoch that was left early is first brought to its end. `stratify`: one label a sample; the
    samples of a label are dealt out so that their number differs by at most one between ranks.

    Given a sampler instead of a dataset, the ranks deal out what it yields. It draws under torch's global
    generator, seeded for the purpose and restored; randomness of its own must be seeded alike on every rank.

    A worker that was lost and came back begins with an epoch that nobody has seen: how far it had come is not known,
    and the first samples again would count twice.

    Positions count the indices drawn. A DataLoader with num_workers > 0 draws ahead of training, so a resumed
    run skips what was fetched and not yet trained on; with num_workers=0 it resumes exactly.
    """

    def __init__(self, source: object, *, rank: int, size: int, stratify: Labels | None = None, seed: int = 0) -> None:
        self.rank = rank
        self.epoch = COMEBACK_EPOCHS * environment.comebacks()
        self.drawn = 0
        self._source = source
        self._size = size
        self._seed = seed
        self._continues, self._random_state = True, torch.get_rng_state()
        total = _length(source)
        if total < size:
            raise ValueError(
                f"{total} samples cannot be shared among {size} workers: some would have none. "
                f"Start at most {total} workers, or bring more data."
            )
        self._classes = None if stratify is None else _classes(stratify, source)

    def __len__(self) -> int:
        return len(range(self.rank, _length(self._source), self._size))

    def __iter__(self) -> Iterator[int]:
        if not self._continues or self.drawn >= len(self):
            self.epoch, self.drawn = self.epoch + 1, 0
        elif self.drawn:
            # The loader of the interrupted epoch had taken its seed from torch's generator before the checkpoint; the
            # new one has just taken another, which the run that was never interrupted did not.
            torch.set_rng_state(self._random_state)
        self._continues = False
        return self._draw(self._indices()[self.drawn :])

    def _draw(self, indices: list[int]) -> Iterator[int]:
        for index in indices:
            self.drawn += 1
            yield index

    def _indices(self) -> list[int]:
        """All of this rank's indices in this epoch, in order."""
        if isinstance(self._source, Sampler):
            return self._sampled(self._source)
        order = torch.randperm(
            _length(self._source), generator=rng.generator("shard", self._seed, self.epoch), device="cpu"
        )
        if self._classes is None:
            return order[self.rank :: self._size].tolist()
        # Dealt out class by class, then shuffled again: a rank would otherwise see its data in class order.
        mine = order[self._classes[order].argsort(stable=True)][self.rank :: self._size]
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
        return {"epoch": self.epoch, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.drawn = state["epoch"], state["drawn"]
        self._continues, self._random_state = True, torch.get_rng_state()


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
            "stratify needs a dataset: which samples a sampler will yield is not known beforehand. "
            "Write world.shard(dataset, stratify=labels)."
        )
    numbers: dict[Hashable, int] = {}
    values = labels.tolist() if isinstance(labels, Tensor) else labels
    codes = torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], device="cpu")
    if len(codes) != _length(source):
        raise ValueError(
            f"stratify has {len(codes)} labels for {_length(source)} samples, so they cannot be matched. "
            "Give one label a sample, in the dataset's order."
        )
    return codes


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This worker's place among all workers; alone, a world of one."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    _shards: list[weakref.ref[Shard]] = field(default_factory=list, repr=False)

    @property
    def is_first(self) -> bool:
        """True on one worker only: the one that prints and writes."""
        return self.rank == 0

    def shard(self, dataset: object, stratify: Labels | None = None, seed: int = 0) -> Shard:
        """This rank's part of `dataset` (map-style, or a sampler), as a sampler for a DataLoader."""
        shard = Shard(dataset, rank=self.rank, size=self.size, stratify=stratify, seed=seed)
        self._shards.append(weakref.ref(shard))
        return shard

    def _alive(self) -> list[Shard]:
        # Weak, so that shards made for one evaluation and dropped do not count.
        return [shard for reference in self._shards if (shard := reference()) is not None]

    def state_dict(self) -> dict[str, Any]:
        """The positions of the shards in use, in the order they were made."""
        return {"shards": [shard.state_dict() for shard in self._alive()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the shards in use go on where the saved ones stood."""
        saved, shards = state["shards"], self._alive()
        if len(saved) != len(shards):
            raise CheckpointError(
                f"The checkpoint holds the positions of {len(saved)} shards and this run has {len(shards)}, "
                "so they cannot be matched. Make the same calls of world.shard, in the same order, before "
                "loading."
            )
        for shard, position in zip(shards, saved, strict=True):
            shard.load_state_dict(position)


_world: World | None = None


def init() -> World:
    """Join the job that the environment describes; alone, a world of one. Later calls return the same."""
    global _world
    if _world is None:
        job = environment.here()
        if job.world > 1:
            environment.join(job)
        device = environment.device_for(job)
        _world = World(rank=job.rank, size=job.world, local_rank=job.local_rank, device=device)
    return _world


def current() -> World:
    """This process's World; joins first where `init` was not called."""
    return init()
