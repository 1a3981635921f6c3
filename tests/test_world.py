"""World and Shard: where a worker stands, and which part of the data is its own."""

import gc
from collections import Counter
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

import gossamer.world as module
from gossamer.errors import CheckpointError
from gossamer.sampler import Shard
from gossamer.world import World, current, init


def shards(source, size, **options):
    return [Shard(source, rank=rank, size=size, **options) for rank in range(size)]


def deal(parts):
    """The next epoch of every rank."""
    return [list(part) for part in parts]


sizes = st.integers(1, 5).flatmap(lambda size: st.tuples(st.integers(size, 40), st.just(size)))


@given(sizes, st.integers(0, 3))
def test_shards_are_disjoint_and_cover(total_and_size, seed):
    total, size = total_and_size
    parts = shards(range(total), size, seed=seed)
    for epoch in range(3):
        dealt = deal(parts)
        assert sorted(chain(*dealt)) == list(range(total))
        assert [len(part) for part in dealt] == [len(part) for part in parts]
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        assert [part.epoch for part in parts] == [epoch] * size


@given(sizes, st.data())
def test_every_class_is_spread_evenly(total_and_size, data):
    total, size = total_and_size
    labels = data.draw(st.lists(st.sampled_from("abc"), min_size=total, max_size=total))
    parts = shards(range(total), size, stratify=labels)
    dealt = deal(parts)
    assert sorted(chain(*dealt)) == list(range(total))
    assert [len(part) for part in dealt] == [len(part) for part in parts]
    counts = [Counter(labels[index] for index in part) for part in dealt]
    for label in "abc":
        assert max(count[label] for count in counts) - min(count[label] for count in counts) <= 1


def test_a_shard_without_stratify_is_not_spread_evenly():
    """The twin: what the check above would see if labels were ignored."""
    labels = [index < 20 for index in range(40)]
    counts = [sum(labels[index] for index in part) for part in deal(shards(range(40), 4))]
    assert max(counts) - min(counts) > 1


def test_a_stratified_shard_is_not_sorted_by_class():
    labels = torch.arange(100) // 50
    order = [int(labels[index]) for index in Shard(range(100), rank=0, size=2, stratify=labels)]
    assert order not in (sorted(order), sorted(order, reverse=True))


def test_epochs_and_seeds_shuffle_anew_and_runs_repeat():
    first, again = shards(range(50), 1) + shards(range(50), 1)
    epochs = [list(first) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [list(again) for _ in range(3)] == epochs
    other = Shard(range(50), rank=0, size=1, seed=1)
    assert list(other) != epochs[0]
    assert epochs[0] != sorted(epochs[0])


@given(st.integers(0, 12), st.integers(0, 2))
def test_a_resumed_shard_goes_on_where_it_stood(drawn, epoch):
    """Epochs of 10 indices on this rank: stopped after some epochs and some draws, then two epochs more."""
    straight, stopped, resumed = (Shard(range(20), rank=1, size=2) for _ in range(3))
    expected = [index for _ in range(5) for index in straight][epoch * 10 + min(drawn, 10) :][:20]
    for _ in range(epoch):
        list(stopped)
    for _ in zip(range(drawn), stopped, strict=False):
        pass
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict() == {"epoch": epoch, "drawn": min(drawn, 10)}
    assert [index for _ in range(3) for index in resumed][:20] == expected


def test_an_epoch_left_early_is_followed_by_the_next():
    shard = Shard(range(10), rank=0, size=1)
    next(iter(shard))
    assert sorted(shard) == list(range(10))
    assert shard.epoch == 1


def test_a_data_loader_resumes_to_the_batch():
    data = torch.arange(24)
    straight, stopped, resumed = (Shard(data, rank=0, size=2) for _ in range(3))
    expected = [batch.tolist() for batch in DataLoader(data, batch_size=3, sampler=straight)]
    batches = iter(DataLoader(data, batch_size=3, sampler=stopped))
    first = next(batches).tolist()
    resumed.load_state_dict(stopped.state_dict())
    rest = [batch.tolist() for batch in DataLoader(data, batch_size=3, sampler=resumed)]
    assert [first, *rest] == expected


def test_a_sampler_is_dealt_out_without_touching_the_global_generator():
    before = torch.get_rng_state()
    parts = shards(RandomSampler(range(21)), 4)
    epochs = [deal(parts) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(sorted(chain(*dealt)) == list(range(21)) for dealt in epochs)
    assert epochs[0] != epochs[1]
    torch.rand(1)  # ranks whose generators stand elsewhere still see the same sequence
    assert deal(shards(RandomSampler(range(21)), 4)) == epochs[0]


def test_a_sampler_may_repeat_and_resumes():
    sampler = WeightedRandomSampler([0.9, 0.1, 0.5], 30)
    stopped, resumed = (Shard(sampler, rank=0, size=2) for _ in range(2))
    drawing = iter(stopped)
    head = [next(drawing) for _ in range(7)]
    resumed.load_state_dict(stopped.state_dict())
    assert head + list(resumed) == list(Shard(sampler, rank=0, size=2))
    assert len(resumed) == 15


def test_the_generator_is_restored_when_a_sampler_fails():
    class Broken(Sampler[int]):
        def __len__(self):
            return 4

        def __iter__(self):
            torch.rand(1)
            raise OSError("no data")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="no data"):
        iter(Shard(Broken(), rank=0, size=2))
    assert torch.equal(torch.get_rng_state(), before)


class Stream(IterableDataset):
    def __len__(self):
        return 4

    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (iter([1, 2]), {}, TypeError, "list_iterator has no length"),
        (Stream(), {}, TypeError, "Stream has no length or cannot be indexed"),
        (range(2), {}, ValueError, "2 samples cannot be shared among 3 workers.*at most 2"),
        (range(4), {"stratify": [0, 1]}, ValueError, "2 labels for 4 samples"),
        (range(4), {"non_iid": 0.5}, ValueError, r"labels=\[\.\.\.\], non_iid=0\.5"),
        (range(4), {"labels": [0] * 4}, ValueError, "one of them would be ignored"),
        (range(4), {"labels": [0] * 4, "stratify": [0] * 4, "non_iid": 1}, ValueError, "one of them would be ignored"),
        (range(4), {"labels": [0] * 4, "non_iid": 0}, ValueError, "concentration"),
        (range(4), {"labels": [0] * 4, "non_iid": float("nan")}, ValueError, "concentration"),
        (RandomSampler(range(4)), {"labels": [0] * 4, "non_iid": 1}, TypeError, "need a dataset"),
        (RandomSampler(range(4)), {"stratify": [0, 1, 0, 1]}, TypeError, "need a dataset"),
    ],
)
def test_what_cannot_be_divided_is_refused(source, options, error, message):
    with pytest.raises(error, match=message):
        Shard(source, rank=0, size=3, **options)


def world(rank=0, size=2):
    return World(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))


def test_a_world_deals_out_and_remembers_its_shards():
    mine, theirs = world(0), world(1)
    assert sorted([*mine.shard(range(9)), *theirs.shard(range(9))]) == list(range(9))
    assert (mine.is_first, theirs.is_first) == (True, False)
    train, validation = mine.shard(range(8)), mine.shard(range(6), seed=1)
    list(train)
    next(iter(validation))
    assert mine.state_dict() == {"shards": [{"epoch": 0, "drawn": 4}, {"epoch": 0, "drawn": 1}]}
    resumed = world(0)
    again = resumed.shard(range(8)), resumed.shard(range(6), seed=1)
    resumed.load_state_dict(mine.state_dict())
    assert [shard.drawn for shard in again] == [4, 1]
    expected = list(train)
    assert list(again[0]) == expected
    assert again[0].epoch == 1


def test_shards_that_were_dropped_do_not_count():
    here = world()
    kept = here.shard(range(8))
    for _ in range(3):
        list(here.shard(range(4)))
    gc.collect()
    assert here.state_dict() == {"shards": [kept.state_dict()]}


def test_positions_of_other_shards_are_refused():
    here = world()
    kept = here.shard(range(8))
    with pytest.raises(CheckpointError, match="2 shards and this run has 1"):
        here.load_state_dict({"shards": [kept.state_dict()] * 2})


@pytest.fixture
def alone(monkeypatch):
    """No launcher's variables, and no world yet."""
    monkeypatch.setattr(module, "_world", None)
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_a_world_of_one_joins_nothing(alone, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a world of one has nobody to join")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    here = init()
    assert (here.rank, here.size, here.local_rank, here.is_first) == (0, 1, 0, True)
    assert here.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert init() is here
    assert current() is here
    assert sorted(here.shard(range(5))) == list(range(5))


def test_the_current_world_is_made_when_needed(alone):
    assert current() is init()


def test_a_job_of_several_is_joined(alone, monkeypatch):
    joined = []
    monkeypatch.setattr(module.environment, "join", joined.append)
    environ = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    here = init()
    assert (here.rank, here.size, here.local_rank) == (1, 3, 0)
    assert [job.master_address for job in joined] == ["10.0.0.1"]
    assert init() is here
    assert len(joined) == 1
