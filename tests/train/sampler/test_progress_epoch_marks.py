"""Epoch marks: what is drawn outside of session.epoch(), and not trained on, does not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nightly import nightly
from torch.utils.data import DataLoader, IterableDataset

from gossamer.train.sampler import Shard, StreamShard
from gossamer.train.sampler.position import Regrouping
from gossamer.train.session.tracked_parts import TrackedLoader
from gossamer.train.world_state import WorldState

DATA = torch.arange(24)
WAYS = ("sampler", "loader", "loader with workers", "tracked loader", "stream")
Reads = Any


class Stream(IterableDataset[int]):
    """Another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(int(item) + 5 * self.epoch) % 24 for item in DATA])


class Rank:
    """One rank's world, a session that counts steps, and what it iterates over."""

    def __init__(self, rank: int, way: str = "sampler", size: int = 2) -> None:
        self.world = WorldState(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))
        self.steps = 0
        self.shard: Any = self.world.shard(Stream() if way == "stream" else DATA)
        self.reads: Any = self.shard
        if "loader" in way:
            workers = 2 if "workers" in way else 0
            self.reads = DataLoader(DATA, batch_size=None, sampler=self.shard, num_workers=workers)
        if way == "tracked loader":
            self.reads = TrackedLoader(self.reads)
        self.world.watch(lambda: self.steps)

    def draw(self, count: int = 24) -> list[int]:
        return [int(item) for _, item in zip(range(count), self.reads, strict=False)]

    def train(self, count: int = 24) -> list[int]:
        """A loop over one epoch within session.epoch(), without an agreement."""
        self.world.enter_epoch()
        drawn = self.draw(count)
        self.steps += len(drawn)
        self.world.leave_epoch([self.world.entered_epochs()])
        return drawn


@pytest.mark.parametrize("way", WAYS)
def test_set_epoch_begins_a_later_epoch_and_repeats_none(way: str) -> None:
    counted, told = Rank(0, way), Rank(0, way)
    epochs = [counted.train() for _ in range(6)]
    assert epochs[3] not in epochs[:3]
    taken = []
    for epoch in (0, 1, 4, 2):
        told.shard.set_epoch(epoch)
        taken.append(told.train())
    assert taken == [epochs[0], epochs[1], epochs[4], epochs[5]]


@pytest.mark.parametrize("way", WAYS)
def test_set_epoch_leaves_an_interrupted_epoch_to_be_completed(way: str) -> None:
    straight, stopped, resumed = Rank(0, way), Rank(0, way), Rank(0, way)
    epochs = [straight.train() for _ in range(4)]
    stopped.shard.set_epoch(1)
    stopped.train(5)
    resumed.shard.load_state_dict(stopped.shard.state_dict())
    resumed.shard.set_epoch(2)
    taken = [resumed.draw(), resumed.draw()]
    assert taken[1] == epochs[2]
    if way != "loader with workers":  # which draws ahead
        assert taken[0] == epochs[1][5:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("looked_at", [24, *nightly(1, 3)])
def test_draws_between_epochs_do_not_count(way: str, looked_at: int) -> None:
    alone, looking = Rank(0, way), Rank(0, way)
    for _ in range(2):
        looking.draw(looked_at)
        looking.draw(looked_at)
        assert looking.train() == alone.train()


@pytest.mark.parametrize("way", WAYS[:4])
def test_draws_before_a_resumed_epoch_continues_do_not_count(way: str) -> None:
    stopped, rest = Rank(0, way), Rank(0, way)
    stopped.world.enter_epoch()
    head = stopped.draw(5)
    stopped.steps += 1
    state = stopped.world.state_dict()
    rest.world.load_state_dict(state)
    ahead = state["shards"][0]["drawn"]  # loaders with workers draw ahead
    rest.draw(2)
    assert head + rest.train() == (whole := Rank(0).draw())[:5] + whole[ahead:]


def test_a_checkpoint_between_epochs_is_without_what_was_only_looked_at() -> None:
    one, other = Rank(0), Rank(0)
    one.train()
    other.train()
    before = one.world.state_dict()
    one.draw()
    assert one.world.state_dict() == before == other.world.state_dict()
    assert one.shard.epoch == 1, "the iterator that looks is where it was"


def test_epochs_that_were_trained_on_outside_of_the_block_count() -> None:
    """A loop that warms up without session.epoch()."""
    rank, whole = Rank(0), Shard(DATA, rank=0, size=2)
    warmed_up = rank.draw()
    rank.steps += 1
    assert [warmed_up, rank.train(), rank.train()] == [list(whole) for _ in range(3)]
    trained = rank.draw(4)
    rank.steps += 1
    assert trained == list(whole)[:4]
    assert rank.world.state_dict()["shards"] == [{"epoch": 3, "drawn": 4}]


def test_without_a_session_every_iteration_counts() -> None:
    world = WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    shard = world.shard(range(9))
    next(iter(shard))
    assert world.state_dict()["shards"] == [{"epoch": 0, "drawn": 1}]
    list(shard)
    assert shard.epoch == 1


def test_a_session_that_is_attached_later_leaves_the_marks_alone() -> None:
    rank = Rank(0)
    rank.draw(3)
    rank.world.watch(lambda: rank.steps)
    assert rank.train() == list(Shard(DATA, rank=0, size=2))


def test_workers_that_come_and_go_share_what_nobody_trained_on() -> None:
    """Rank 0 has looked at a whole epoch before it; then rank 1 is lost."""
    ranks = [Rank(number, size=3) for number in range(3)]
    for rank in ranks:
        rank.train()
    ranks[0].draw()
    positions = [[rank.world.state_dict()["shards"][0] for rank in ranks]]
    ranks[0].world.move(0, 2, positions, stayed=[0, 2])
    ranks[2].world.move(1, 2, positions, stayed=[0, 2])
    assert sorted(ranks[0].train() + ranks[2].train()) == DATA.tolist()


@pytest.mark.parametrize("options", [{}, {"labels": [0, 1, 2] * 8, "non_iid": 0.5}])
def test_a_resumed_epoch_continues_where_workers_went_after_a_look_at_it(options: dict[str, Any]) -> None:
    ranks = [Rank(number) for number in range(2)]
    for rank in ranks:
        rank.shard = rank.reads = rank.world.shard(DATA, **options)
        rank.steps += 1
        rank.draw(4)
        state = rank.world.state_dict()
        rank.world.load_state_dict(state)
    states = [[rank.world.state_dict()["shards"][0] for rank in ranks]]
    ranks[0].draw(2)
    ranks[0].world.move(0, 1, states, stayed=[0])
    assert len(ranks[0].train()) == (24 - 8 if not options else len(ranks[0].shard) - 4)


@pytest.mark.parametrize("way", ["sampler", "tracked loader", "stream"])
@pytest.mark.parametrize("more", [1, 3])
def test_ranks_agree_on_the_next_epoch(way: str, more: int) -> None:
    """Rank 0 iterates more often within the block, or rank 1 not at all."""
    ranks = [Rank(number, way) for number in range(2)]
    for rank in ranks:
        rank.world.enter_epoch()
    for _ in range(more):
        ranks[0].draw()
    entered = [rank.world.entered_epochs() for rank in ranks]
    assert entered == [[more - 1], [-1]]
    for rank in ranks:
        rank.steps += 1
        rank.world.leave_epoch(entered)
    assert [rank.shard.epoch for rank in ranks] == [more - 1] * 2
    assert [rank.world.state_dict()["shards"][0]["epoch"] for rank in ranks] == [more - 1] * 2
    assert sorted(ranks[0].train() + ranks[1].train()) == DATA.tolist()


def test_an_epoch_that_all_left_early_stays_as_it_is() -> None:
    ranks = [Rank(number) for number in range(2)]
    for rank in ranks:
        rank.world.enter_epoch()
        rank.draw(4)
        rank.steps += 1
        rank.world.leave_epoch([[0], [0]])
        assert rank.world.state_dict()["shards"] == [{"epoch": 0, "drawn": 4}]


def test_ranks_with_other_shards_are_left_alone() -> None:
    rank = Rank(0)
    rank.world.leave_epoch([[0], [0, 4]])
    assert rank.shard.epoch == 0


# -- the position that reports hold ------------------------------------------------------------------------------------


def test_a_lap_is_half_an_epoch_of_this_rank() -> None:
    shard = Shard(range(25), rank=0, size=2)
    laps = [shard.lap for _ in range(2) for _ in shard]
    assert laps == [min(2, drawn // 6) for drawn in range(1, 14)] + [(12 + drawn) // 6 for drawn in range(1, 14)]


def test_laps_of_ranks_that_keep_step_are_never_two_apart() -> None:
    """The parts differ by one sample, and an epoch of one rank begins a draw before the other's."""
    one, other = Shard(range(9), rank=0, size=2), Shard(range(9), rank=1, size=2)
    for _ in range(3):
        drawing = zip([s.lap for s in [one] for _ in one], [s.lap for s in [other] for _ in other], strict=False)
        assert all(abs(mine - theirs) < 2 for mine, theirs in drawing)


def test_the_lap_follows_workers_that_come_and_go() -> None:
    shard = Shard(range(24), rank=0, size=3)
    drawing = iter(shard)
    for _ in range(6):
        next(drawing)
    state = shard.state_dict()
    shard.regroup([state] * 3, Regrouping(0, 2, [0, 1]))
    newcomer = Shard(range(24), rank=0, size=2)
    newcomer.regroup([state] * 3, Regrouping(1, 2, [0]))
    assert shard.lap == newcomer.lap == 18 // 2 // 6


@pytest.mark.parametrize(
    "shard",
    [
        Shard(range(9), rank=0, size=2, shuffle=False),
        Shard(range(9), rank=0, size=2, labels=[0, 1, 0] * 3, non_iid=0.5),
        StreamShard(Stream(), rank=0, size=2),
    ],
)
def test_there_is_no_lap_where_epochs_do_not_matter_or_are_unknown(shard: Any) -> None:
    world = WorldState(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    world.keep(shard)
    list(shard)
    assert shard.lap is None
    assert world.lap == 0
    shuffled = world.shard(range(8))
    list(shuffled)
    assert world.lap == shuffled.lap == 2


def test_a_shard_of_an_earlier_training_counts_once_it_is_drawn_from_again() -> None:
    """Ranks may discard it at different times, so its position is not compared before."""
    steps = 0
    world = WorldState(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    earlier = world.shard(range(8))
    world.begin_training()
    world.watch(lambda: steps)
    list(earlier)
    steps += 2
    assert world.lap == 2
    world.begin_training()
    assert world.lap == 0
    shard = world.shard(range(8))
    world.enter_epoch()
    list(shard)
    steps += 2
    assert world.entered_epochs() == [0]
    world.leave_epoch([[0], [1]])
    assert (world.lap, shard.entered, earlier.entered) == (4, 1, 0), "the earlier one is not moved"
    next(iter(earlier))
    assert world.entered_epochs() == [1, 1]


def test_batches_drawn_before_a_session_do_not_exclude_a_shard() -> None:
    world = WorldState(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    shard = world.shard(range(8))
    next(iter(shard))
    world.begin_training()
    world.watch(lambda: 0)
    world.enter_epoch()
    assert shard.state_dict() == Shard(range(8), rank=0, size=2).state_dict(), "rewound"
    assert len(list(shard)) == 4
    assert world.lap == 2


def test_laps_of_workers_with_unequal_parts_are_alike() -> None:
    parts = [Shard(DATA, rank=rank, size=3) for rank in range(3)]
    states, widths = [part.state_dict() for part in parts], [4, 1, 1]
    for rank, part in enumerate(parts):
        part.regroup(states, Regrouping(rank, 3, range(3), widths))
    loops = [iter(part) for part in parts]
    for row in range(4):
        for loop, width in zip(loops, widths, strict=True):
            for _ in range(width):
                next(loop)
        assert {part.lap for part in parts} == {(row + 1) // 2}


def test_a_change_of_the_workers_is_no_end_of_an_epoch_block() -> None:
    """Shares that change in the same step still divide the rest by speed."""
    ranks = [Rank(rank, size=3) for rank in range(3)]
    for rank in ranks:
        rank.world.enter_epoch()
        rank.draw(2)
        rank.steps += 1
    states = [[rank.world.state_dict()["shards"][0] for rank in ranks]]
    for number, rank in enumerate(ranks[:2]):
        rank.world.move(number, 2, states, stayed=[0, 1])
    parts = [rank.world.parts_in_use(number, 2) for number, rank in enumerate(ranks[:2])]
    for number, rank in enumerate(ranks[:2]):
        rank.world.divide([2, 1], parts, number)
    assert [len([*rank.shard]) for rank in ranks[:2]] == [16, 8], "the next epoch"
