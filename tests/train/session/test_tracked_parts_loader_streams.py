"""Tracked loaders of streams: the batches that a resumed loop is given, for every number of DataLoader workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from support.nightly import once_each
from support.virtual_workers import notices
from torch.utils.data import DataLoader, IterableDataset

from gossamer.errors import AttachError
from gossamer.train.checkpoint.reshard import fold_positions
from gossamer.train.session.tracked_parts import TrackedLoader
from gossamer.train.world_state import WorldState

TOTAL = 37  # 19 and 18 items on two ranks
Step = tuple[int, tuple[int, ...], float]  # (epoch, batch, a draw from torch's generator)


class Numbers(IterableDataset[int]):
    def __init__(self) -> None:
        self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.first = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(TOTAL):
            yield (number + self.first) % TOTAL


LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {"batch_size": 4},
    "workers": {"batch_size": 4, "num_workers": 2},
    "workers, drop_last": {"batch_size": 4, "num_workers": 2, "drop_last": True},
    "batches that fill the shard": {"batch_size": 9, "num_workers": 1},
    "single items": {"batch_size": None, "num_workers": 2},
}


def world(rank: int = 1, size: int = 2) -> WorldState:
    return WorldState(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))


class Loop:
    """The loop that everybody writes, which may stop and go on in another process."""

    def __init__(self, options: Mapping[str, Any], *, rank: int = 1, size: int = 2, tracked: bool = True) -> None:
        self.world = world(rank, size)
        loader: Any = DataLoader(self.world.shard(Numbers()), **options)
        self.loader = TrackedLoader(loader) if tracked else loader
        self.epoch = 0

    def steps(self) -> Iterator[Step]:
        for epoch in range(self.epoch, 2):
            self.epoch = epoch
            for batch in self.loader:
                flat = torch.as_tensor(batch).flatten().tolist()
                yield epoch, tuple(flat), float(torch.rand(()))

    def state(self) -> dict[str, Any]:
        return {"world": self.world.state_dict(), "epoch": self.epoch, "random": torch.get_rng_state()}

    def resume(self, state: Mapping[str, Any]) -> list[Step]:
        torch.manual_seed(99)
        torch.set_rng_state(state["random"])
        self.world.load_state_dict(state["world"])
        self.epoch = state["epoch"]
        return list(self.steps())


def whole(options: Mapping[str, Any]) -> tuple[list[Step], list[dict[str, Any]]]:
    torch.manual_seed(3)
    loop = Loop(options)
    done, states = [], []
    for step in loop.steps():
        done.append(step)
        states.append(loop.state())
    return done, states


@once_each("name", LOADERS, not_by_day=["workers, drop_last"])
def test_no_batch_is_skipped_or_seen_twice(name: str) -> None:
    """Resumed in the middle of an epoch, in its last batch, and in the next epoch."""
    done, states = whole(LOADERS[name])
    last = max(place for place, step in enumerate(done) if step[0] == 0)
    for place in (0, last, last + 1):
        assert Loop(LOADERS[name]).resume(states[place]) == done[place + 1 :], f"resumed after step {place}"


def test_batches_are_the_same_for_every_number_of_workers() -> None:
    """So that a run goes on with another number of them, too."""
    steps, states = whole(LOADERS["no workers"])
    more = whole(LOADERS["workers"])
    assert [step[:2] for step in more[0]] == [step[:2] for step in steps]
    assert Loop(LOADERS["workers"]).resume(states[1]) == steps[2:]


def test_untracked_loader_with_workers_restarts_and_is_reported() -> None:
    """The twin: what the law above sees without tracking."""
    loop = Loop(LOADERS["workers"], rank=0, tracked=False)
    steps = loop.steps()
    seen = [next(steps)]
    with notices() as said:
        state = loop.state()
    assert [line for line in said if "draw a stream from its beginning" in line] == said != []
    seen += Loop(LOADERS["workers"], rank=0, tracked=False).resume(state)
    assert len({step[:2] for step in seen}) < len(seen)


@pytest.mark.parametrize("taken", [1, 5])
def test_another_number_of_ranks_continues_where_all_stood(taken: int) -> None:
    """Two ranks took `taken` batches each; three share what is left, and each item is seen once in the epoch."""
    seen: list[int] = []
    positions = []
    for rank in range(2):
        loop = Loop(LOADERS["no workers"], rank=rank)
        for _, (epoch, batch, _) in zip(range(taken), loop.steps(), strict=False):
            assert epoch == 0
            seen += batch
        positions.append(loop.world.state_dict())
    for rank in range(3):
        loop = Loop(LOADERS["workers"] if rank == 1 else LOADERS["no workers"], rank=rank, size=3)
        loop.world.load_state_dict(fold_positions(positions, rank, 3))
        for batch in loop.loader:
            seen += batch.tolist()
    assert sorted(seen) == [*range(TOTAL)]


@pytest.mark.parametrize("name", ["no workers", "workers"])
def test_prefetched_samples_are_divided_again_after_a_change(name: str) -> None:
    """Rank 1 of 3 is lost after two batches, and another comes; all that was not trained on is, once."""
    loops = [Loop(LOADERS[name], rank=rank, size=3) for rank in range(3)]
    loaders = [iter(loop.loader) for loop in loops]
    seen = [next(loader) for loader in loaders for _ in range(2)]
    positions = [*zip(*(loop.world.state_dict()["shards"] for loop in loops), strict=True)]
    newcomer = Loop(LOADERS[name], rank=2, size=3)
    for rank, loop in enumerate((loops[0], loops[2], newcomer)):
        loop.world.move(rank, 3, positions, stayed=[0, 2])
    seen += [batch for loader in (loaders[0], loaders[2], newcomer.loader) for batch in loader]
    assert sorted(torch.cat(seen).tolist()) == [*range(TOTAL)]


def test_workers_that_persist_are_refused() -> None:
    loader = DataLoader(world().shard(Numbers()), 4, num_workers=1, persistent_workers=True)
    with pytest.raises(AttachError, match="persistent_workers out"):
        TrackedLoader(loader)
