"""Tracked loader: a resumed loop is given exactly the batches that the interrupted one had not taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from support.nightly import nightly, once_each
from support.virtual_workers import notices
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from gossamer.errors import AttachError
from gossamer.train.checkpoint.reshard import fold_positions
from gossamer.train.session.tracked_parts import RestoredLoader, TrackedLoader
from gossamer.train.world_state import WorldState

DATA = torch.arange(37)  # 19 and 18 samples on two ranks
EPOCHS = 2
Step = tuple[int, tuple[int, ...], float]  # (epoch, batch, a draw from torch's generator)

LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {"batch_size": 4},
    "no workers, drop_last": {"batch_size": 4, "drop_last": True},
    "workers": {"batch_size": 4, "num_workers": 2},
    "workers, drop_last": {"batch_size": 4, "num_workers": 2, "drop_last": True},
    "persistent": {"batch_size": 4, "num_workers": 2, "persistent_workers": True},
    "prefetching more than an epoch": {"batch_size": 6, "num_workers": 2, "prefetch_factor": 4},
    "batches that fill the shard": {"batch_size": 9, "num_workers": 1},
    "single samples": {"batch_size": None, "num_workers": 1},
    "whole batches": {"batches": "divided"},
    "whole batches, workers": {"batches": "divided", "num_workers": 2},
    "batches of the shard": {"batches": "formed"},
    "batches of the shard, workers": {"batches": "formed", "num_workers": 2},
}

# Whether the last batch is dropped, and how batches are formed, is shown without workers, too
each_loader = once_each("name", LOADERS, not_by_day=["workers, drop_last", "batches of the shard, workers"])


class Lengths(Sampler[list[int]]):
    """A batch sampler with batches of different sizes, as those that put samples of equal length together."""

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(13).tolist():
            yield [*range(37)][3 * number + number % 2 : 3 * number + 3 + (number + 1) % 2]


def world(rank: int = 1, size: int = 2) -> WorldState:
    return WorldState(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))


def loader_of(world: WorldState, options: Mapping[str, Any]) -> DataLoader[Any]:
    """A loader of the shard's samples, or of batches that the shard divides, or that are formed of its samples."""
    rest = {name: value for name, value in options.items() if name != "batches"}
    if options.get("batches") == "divided":
        return DataLoader(DATA, batch_sampler=world.shard(Lengths()), **rest)
    shard = world.shard(DATA)
    if options.get("batches") == "formed":
        return DataLoader(DATA, batch_sampler=BatchSampler(shard, 4, drop_last=False), **rest)
    return DataLoader(DATA, sampler=shard, **rest)


class Loop:
    """The loop that everybody writes, which may stop and go on in another process: as far as loaders know, this is
    one. `state` is what a checkpoint of it holds."""

    def __init__(self, options: Mapping[str, Any], *, tracked: bool = True, rank: int = 1) -> None:
        self.world = world(rank)
        loader = loader_of(self.world, options)
        self.loader = TrackedLoader(loader) if tracked else loader
        self.epoch = 0

    def steps(self) -> Iterator[Step]:
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            for batch in self.loader:
                yield epoch, tuple(batch.flatten().tolist()), float(torch.rand(()))
        self.epoch = EPOCHS

    def state(self) -> dict[str, Any]:
        return {"world": self.world.state_dict(), "epoch": self.epoch, "random": torch.get_rng_state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["random"])
        self.world.load_state_dict(state["world"])
        self.epoch = state["epoch"]


def whole(options: Mapping[str, Any]) -> tuple[list[Step], list[dict[str, Any]]]:
    """All steps, and what a checkpoint after each would hold."""
    torch.manual_seed(3)
    loop = Loop(options)
    done, states = [], []
    for step in loop.steps():
        done.append(step)
        states.append(loop.state())
    return done, states


def resumed(options: Mapping[str, Any], state: Mapping[str, Any]) -> list[Step]:
    torch.manual_seed(99)
    loop = Loop(options)
    loop.resume(state)
    return list(loop.steps())


@each_loader
def test_no_batch_is_skipped_or_seen_twice(name: str) -> None:
    """Resumed in the middle of an epoch, in its last batch, and in the next epoch."""
    options = LOADERS[name]
    done, states = whole(options)
    last = max(place for place, step in enumerate(done) if step[0] == 0)
    assert {sample for epoch, batch, _ in done if epoch == 0 for sample in batch} <= set(range(37))
    for place in (0, last, last + 1):
        assert resumed(options, states[place]) == done[place + 1 :], f"resumed after step {place}"


@pytest.mark.parametrize("name", ["no workers", "persistent", *nightly("workers, drop_last")])
def test_saved_between_two_epochs(name: str) -> None:
    torch.manual_seed(3)
    loop, between = Loop(LOADERS[name]), None
    done: list[Step] = []
    for epoch in range(EPOCHS):
        done += [(epoch, tuple(batch.tolist()), float(torch.rand(()))) for batch in loop.loader]
        if epoch == 0:
            loop.epoch = 1
            between = loop.state()
    assert between is not None
    assert resumed(LOADERS[name], between) == [step for step in done if step[0] > 0]


def test_an_epoch_left_early_is_brought_to_its_end() -> None:
    """As without workers: the checkpoint is written after `break`, when the loader's iterator is gone."""
    options = LOADERS["workers"]
    done, _ = whole(options)
    torch.manual_seed(3)
    loop = Loop(options)
    for place, _ in enumerate(loop.loader):
        if place == 1:
            break
    torch.manual_seed(5)
    rest = Loop(options)
    rest.resume(loop.state())
    assert [batch for _, batch, _ in rest.steps()] == [batch for _, batch, _ in done[2:]]


def test_untracked_loader_with_workers_skips_samples_and_is_reported() -> None:
    """The twin: what the law above sees without tracking."""
    for options, told in ((LOADERS["workers"], 1), (LOADERS["no workers"], 0)):
        torch.manual_seed(3)
        loop = Loop(options, tracked=False, rank=0)
        with notices() as said:
            steps = loop.steps()
            first = next(steps)
            states = [loop.state() for _ in range(2)]
        assert [line for line in said if "session.track" in line] == said
        assert len(said) == told
        again = Loop(options, tracked=False, rank=0)
        again.resume(states[0])
        assert (next(again.steps())[1] == next(steps)[1]) is (told == 0)
        assert first[0] == 0


def test_tracked_loader_is_not_reported() -> None:
    loop = Loop(LOADERS["workers"], rank=0)
    with notices() as said:
        next(loop.steps())
        loop.state()
    assert said == []


def test_unused_tracked_loader_is_reported() -> None:
    there = world(rank=0)
    loader = DataLoader(DATA, 4, sampler=there.shard(DATA), num_workers=1)
    TrackedLoader(loader)
    with notices() as said:
        next(iter(loader))
        assert there.state_dict()["shards"][0]["drawn"] == 12  # what was fetched
    assert len([line for line in said if "loader = session.track" in line]) == 1


def test_a_position_that_was_loaded_is_saved_as_it_is() -> None:
    """In the last batch of an epoch the loop does not know yet that it is over; nor does a run that resumed there."""
    options = LOADERS["batches that fill the shard"]
    _, states = whole(options)
    last = next(state for state in states if state["world"]["shards"][0]["drawn"] == 18)
    again = Loop(options)
    again.resume(last)
    assert again.state()["world"] == last["world"]


@pytest.mark.parametrize("taken", [3, *nightly(1, 5)])
def test_another_number_of_workers_continues_where_all_stood(taken: int) -> None:
    """Two ranks took `taken` batches each; three share what is left, and each sample is seen once in the epoch."""
    seen: list[int] = []
    positions = []
    for rank in range(2):
        loop = Loop(LOADERS["workers"], rank=rank)
        for _, (_, batch, _) in zip(range(taken), loop.steps(), strict=False):
            seen += batch
        positions.append(loop.world.state_dict())
    for rank in range(3):
        there = world(rank, 3)
        loader = TrackedLoader(DataLoader(DATA, 4, sampler=there.shard(DATA), num_workers=1))
        there.load_state_dict(fold_positions(positions, rank, 3))
        for batch in loader:
            seen += batch.tolist()
    assert sorted(seen) == list(range(37))


def test_it_looks_like_the_loader() -> None:
    loader = DataLoader(DATA, 4, sampler=world().shard(DATA))
    tracked = TrackedLoader(loader)
    assert (len(tracked), tracked.batch_size, tracked.dataset) == (5, 4, DATA)


class Buckets(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from reversed(list(super().__iter__()))


def test_loaders_with_unknown_position_are_refused() -> None:
    shard = world().shard(DATA)
    for loader in (
        DataLoader(DATA, 4),
        DataLoader(DATA, 4, shuffle=True),
        DataLoader(DATA, 4, sampler=RandomSampler(DATA)),
        DataLoader(DATA, batch_sampler=Buckets(shard, 4, drop_last=False)),
    ):
        with pytest.raises(AttachError, match=r"sampler=world\.shard"):
            TrackedLoader(loader)
    with pytest.raises(AttachError, match="in_order"):
        TrackedLoader(DataLoader(DATA, 4, sampler=shard, num_workers=1, in_order=False))


def test_a_resumed_run_is_resumed_once_more() -> None:
    """The second position counts from the shard's beginning, not from where the first resumption went on."""
    done, states = whole(LOADERS["no workers"])
    again = Loop(LOADERS["no workers"])
    again.resume(states[0])
    steps = again.steps()
    assert [next(steps) for _ in range(2)] == done[1:3]
    assert resumed(LOADERS["no workers"], again.state()) == done[3:]


# -- workers that come and go ------------------------------------------------------------------------------------------


@each_loader
def test_prefetched_samples_are_divided_again_after_a_change(name: str) -> None:
    """Rank 1 of 3 is lost after two batches, and another comes; all that was not trained on is, once."""
    options = LOADERS[name]
    worlds = [world(rank, 3) for rank in range(3)]
    loaders = [TrackedLoader(loader_of(there, options)) for there in worlds]
    loops = [iter(loader) for loader in loaders]
    seen = [next(loop) for loop in loops for _ in range(2)]
    positions = list(zip(*(there.state_dict()["shards"] for there in worlds), strict=True))
    newcomer = world(2, 3)
    arriving = TrackedLoader(loader_of(newcomer, options))
    before = torch.get_rng_state()
    for rank, there in enumerate((worlds[0], worlds[2], newcomer)):
        there.move(rank, 3, positions, stayed=[0, 2])
    seen += [batch for loop in (loops[0], loops[2]) for batch in loop]
    assert torch.equal(torch.get_rng_state(), before), "new iterators drew seeds"
    seen += [*arriving]
    samples = torch.cat([batch.reshape(-1) for batch in seen]).tolist()
    assert len(samples) == len({*samples})
    left_out = 37 - len(samples)
    assert left_out <= (9 if options.get("drop_last") else 0), "less than a batch each"


def test_a_change_is_taken_up_while_the_loop_waits_in_another_thread() -> None:
    """The loop stands in its step while the thread that hears of the change deals out anew."""
    there, other = world(0, 2), world(1, 2)
    loader = TrackedLoader(DataLoader(DATA, 4, sampler=there.shard(DATA), num_workers=1))
    kept = other.shard(DATA)
    in_step, moved = threading.Event(), threading.Event()

    def hear() -> None:
        assert in_step.wait(60)
        states = [there.state_dict()["shards"][0], kept.state_dict()]
        there.move(0, 1, [states], stayed=[0])
        moved.set()

    listener = threading.Thread(target=hear)
    listener.start()
    seen: list[int] = []
    for count, batch in enumerate(loader):
        seen += batch.tolist()
        if count == 1:
            in_step.set()
            assert moved.wait(60)
    listener.join()
    assert (there.rank, there.size) == (0, 1)
    assert sorted(seen) == list(range(37)), "the lost worker had drawn nothing"


class Counting:
    """A dataset that counts what is fetched of it."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


def test_no_sample_is_fetched_twice_with_constant_workers() -> None:
    data = Counting()
    loader = TrackedLoader(DataLoader(data, 4, sampler=world(0, 2).shard(data)))  # type: ignore[arg-type]
    for epoch in range(3):
        taken = torch.cat([*loader]).tolist()
        assert taken == data.fetched[10 * epoch :]


class Seeded:
    """A loader with a state, whose iterators draw a seed as they are made, as torchdata's do."""

    def __init__(self) -> None:
        self.iterator: Iterator[int] | None = None

    def __iter__(self) -> Iterator[int]:
        found, self.iterator = self.iterator or self._made(), None
        return found

    def _made(self) -> Iterator[int]:
        torch.rand(())
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        self.iterator = self.iterator or self._made()
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.iterator = None


def test_a_restored_loader_draws_no_seed_for_an_epoch_under_way() -> None:
    loader, before = RestoredLoader(Seeded()), torch.get_rng_state()
    loader.load_state_dict({})
    assert [*loader] == [0, 1, 2]
    assert torch.equal(torch.get_rng_state(), before)
    assert [*loader] == [0, 1, 2]
    assert not torch.equal(torch.get_rng_state(), before), "the next epoch's is drawn"
