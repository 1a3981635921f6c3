"""Stream shards: every item once over all ranks and all workers of their loaders, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.reshard import fold_positions
from gossamer.train.sampler import StreamShard
from gossamer.train.sampler.position import Regrouping
from gossamer.train.world_state import WorldState


class Numbers(IterableDataset[int]):
    """0 to total - 1, rotated by the epoch, where it is told of that."""

    def __init__(self, total: int, first: int = 0) -> None:
        self.total, self.first = total, first

    def __iter__(self) -> Iterator[int]:
        for number in range(self.total):
            yield (number + self.first) % self.total


class Rotated(Numbers):
    def set_epoch(self, epoch: int) -> None:
        self.first = epoch


class SplitByWorker(Numbers):
    """As torch's documentation splits a stream."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(self.total) if worker is None else range(worker.id, self.total, worker.num_workers)


def shards(total: int, size: int, **options: Any) -> list[StreamShard[int]]:
    return [StreamShard(Numbers(total), rank=rank, size=size, **options) for rank in range(size)]


sizes = st.integers(0, 40), st.integers(1, 5)


@given(*sizes)
def test_ranks_are_disjoint_and_cover(total: int, size: int) -> None:
    parts = shards(total, size)
    for epoch in range(3):
        dealt = [[*part] for part in parts]
        assert sorted(chain(*dealt)) == [*range(total)]
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        assert [part.epoch for part in parts] == [epoch] * size


@given(*sizes)
def test_even_ranks_have_equally_many(total: int, size: int) -> None:
    dropped = [[*part] for part in shards(total, size, even="drop")]
    assert sorted(chain(*dropped)) == [*range(total - total % size)]
    padded = [[*part] for part in shards(total, size, even="pad")]
    repeated = [total - total % size] * (-total % size)
    assert sorted(chain(*padded)) == sorted([*range(total), *repeated])
    assert {len(part) for part in (*dropped, *padded)} <= {total // size, -(-total // size)}


@given(st.integers(0, 30), st.integers(0, 12), st.integers(0, 2))
def test_a_resumed_stream_continues_where_it_stood(total: int, drawn: int, epoch: int) -> None:
    straight, stopped, resumed = (StreamShard(Rotated(total), rank=1, size=2) for _ in range(3))
    epochs = [[*straight] for _ in range(5)]
    for _ in range(epoch):
        list(stopped)
    for _ in islice(stopped, drawn):
        pass
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict()
    own = total // 2
    rest = epochs[epoch][drawn:] if drawn < own else [] if drawn == own and own else None
    following = [[*resumed] for _ in range(2)]
    if rest is None:  # the loop was told of the end
        assert following == epochs[epoch + 1 : epoch + 3]
    else:
        assert following == [rest, epochs[epoch + 1]]


@given(st.integers(0, 40), st.lists(st.integers(0, 8), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_other_numbers_of_workers_share_what_is_left(total: int, drawn: list[int], second: int, third: int) -> None:
    """Ranks that have drawn unequally are followed by others, and those by others again: each item comes once."""
    seen: list[int] = []
    parts = shards(total, len(drawn))
    for part, count in zip(parts, drawn, strict=True):
        seen += islice(part, count)
    for size, count in ((second, 2), (third, total)):
        states = [{"shards": [part.state_dict()]} for part in parts]
        parts = shards(total, size)
        for rank, part in enumerate(parts):
            part.load_state_dict(fold_positions(states, rank, size)["shards"][0])
            if not part.state_dict()["over"]:
                seen += islice(part, count)
    assert sorted(seen) == [*range(total)]


def test_who_resumes_a_stream_without_its_position_sees_items_twice() -> None:
    """The twin of both laws above."""
    stopped, resumed = shards(10, 2)[0], shards(10, 2)[0]
    seen = [*islice(stopped, 2), *resumed]
    assert sorted(seen) != [*range(0, 10, 2)]


def test_all_who_were_told_of_the_end_begin_the_next_epoch_with_any_number() -> None:
    parts = [StreamShard(Rotated(10), rank=rank, size=2) for rank in range(2)]
    for part in parts:
        list(part)
    states = [{"shards": [part.state_dict()]} for part in parts]
    again = [StreamShard(Rotated(10), rank=rank, size=3) for rank in range(3)]
    for rank, part in enumerate(again):
        part.load_state_dict(fold_positions(states, rank, 3)["shards"][0])
    assert [[*part] for part in again] == [[1, 4, 7, 0], [2, 5, 8], [3, 6, 9]]


@pytest.mark.parametrize("total", [7, 8, 30])
def test_workers_that_come_and_go_within_an_epoch(total: int) -> None:
    """One of three is lost, and one comes; iterators under way go on with what is left."""
    parts = shards(total, 3)
    loops = [iter(part) for part in parts]
    seen = [next(loop) for loop in loops for _ in range(2)]
    positions = [part.state_dict() for part in parts]
    newcomer = shards(total, 3)[2]
    for rank, part in enumerate((parts[0], parts[2], newcomer)):
        part.regroup(positions, Regrouping(rank, 3, [0, 2]))
    seen += [item for loop in (loops[0], loops[2], newcomer) for item in loop]
    assert sorted(seen) == [*range(total)]
    following = [[*part] for part in (parts[0], parts[2], newcomer)]
    assert sorted(chain(*following)) == [*range(total)]


@pytest.mark.parametrize("total", [13, 20, 41])
def test_shares_of_a_stream_follow_the_speed(total: int) -> None:
    parts = shards(total, 3)
    loops = [iter(part) for part in parts]
    first = [next(loop) for loop in loops for _ in range(2)]
    positions, widths = [part.state_dict() for part in parts], [3, 1, 1]
    for rank, part in enumerate(parts):
        part.regroup(positions, Regrouping(rank, 3, range(3), widths))
    rest = [[*loop] for loop in loops]
    assert sorted(chain(first, *rest)) == [*range(total)]
    steps = [-(-len(each) // width) for each, width in zip(rest, widths, strict=True)]
    assert max(steps) - min(steps) <= 1
    for part in parts:
        copy = shards(total, 3)[part.rank]
        copy.load_state_dict(part.state_dict())
        assert [*copy] == [*part]
    assert len({part.epoch for part in parts}) == 1
    following = [[*part] for part in parts]
    assert sorted(chain(*following)) == [*range(total)]
    assert len(following[0]) > 2 * len(following[1])


def test_a_lost_worker_is_taken_to_have_kept_up() -> None:
    parts = shards(20, 2)
    loops = [iter(part) for part in parts]
    seen = [next(loop) for loop in loops for _ in range(3)]
    parts[0].note_trained()
    parts[0].regroup([parts[0].state_dict(), None], Regrouping(0, 1, [0]))
    assert sorted(chain(seen, loops[0])) == [*range(20)]


def test_an_iterator_keeps_its_items_when_another_begins() -> None:
    part = shards(20, 2)[0]
    first = iter(part)
    seen = [next(first) for _ in range(3)]
    next(iter(part))
    assert [*seen, *first] == [*range(0, 20, 2)]


# -- loaders with workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [Numbers(23), SplitByWorker(23)], ids=["plain", "splits itself"])
def test_workers_of_a_loader_share_a_ranks_items(source: Numbers) -> None:
    parts = [StreamShard(source, rank=rank, size=2) for rank in range(2)]
    for _ in range(2):
        seen = [item for part in parts for item in DataLoader(part, batch_size=None, num_workers=2)]
        assert sorted(seen) == [*range(23)]
    assert all(part.drawn_ahead for part in parts)


def test_workers_that_persist_begin_the_next_epoch() -> None:
    part = StreamShard(Numbers(11), rank=0, size=2)
    loader = DataLoader(part, batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert sorted(torch.cat([*loader]).tolist()) == [0, 2, 4, 6, 8, 10]


# -- the world's -------------------------------------------------------------------------------------------------------


def test_a_world_deals_out_streams_and_remembers_them() -> None:
    there = WorldState(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
    part = there.shard(Numbers(9), even="pad")
    assert isinstance(part, StreamShard)
    assert [*part] == [1, 3, 5, 7, 8]
    (state,) = there.state_dict()["shards"]
    assert state == {"epoch": 0, "drawn": 5, "over": True, "total": 10}


def test_what_a_stream_does_not_know_is_refused() -> None:
    there = WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="label frequencies"):
        there.shard(Numbers(9), stratify=[0] * 9)
    with pytest.raises(ValueError, match=r"for streams.*drop_last=True"):
        there.shard(range(9), even="drop")
    with pytest.raises(ValueError, match="even must be"):
        there.shard(Numbers(9), even="most")
    with pytest.raises(TypeError, match=r"generator has no length.*class Stream"):
        there.shard(number for number in range(9))
    with pytest.raises(CheckpointError, match="not a position in a stream"):
        there.shard(Numbers(9)).load_state_dict({"epoch": 0, "drawn": 2})
