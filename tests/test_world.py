"""World and Shard: where a worker stands, and which part of the data is its own."""

import gc
import multiprocessing
from collections import Counter
from datetime import timedelta
from itertools import chain
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_workers import notices
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import gossamer.train.world_state as module
from gossamer.comm.environment.wait_timeout import timeout_seconds
from gossamer.errors import CheckpointError
from gossamer.train.sampler import Shard
from gossamer.train.sampler.position import Regrouping
from gossamer.train.session.tracked_parts import TrackedLoader
from gossamer.train.world_state import WorldState, current
from gossamer.world import World, init


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


def test_epochs_and_seeds_shuffle_again_and_runs_repeat():
    first, again = shards(range(50), 1) + shards(range(50), 1)
    epochs = [list(first) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [list(again) for _ in range(3)] == epochs
    other = Shard(range(50), rank=0, size=1, seed=1)
    assert list(other) != epochs[0]
    assert epochs[0] != sorted(epochs[0])


@given(st.integers(0, 12), st.integers(0, 2))
def test_a_resumed_shard_continues_where_it_stood(drawn, epoch):
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


@pytest.mark.parametrize(
    "options", [{}, {"stratify": [0, 1, 2] * 6 + [0]}, {"labels": [0, 1] * 9 + [0], "non_iid": 0.5}]
)
def test_unshuffled_shards_keep_the_datasets_order_in_every_epoch(options):
    parts = shards(range(19), 3, shuffle=False, **options)
    first, second = deal(parts), deal(parts)
    assert first == second
    assert [sorted(part) for part in first] == first
    assert sorted(chain(*first)) == list(range(19))
    if not options:
        assert first[1] == list(range(1, 19, 3)), "as torch's DistributedSampler deals out"
    assert deal(shards(range(19), 3, **options)) != first


def test_a_world_deals_out_unshuffled():
    assert list(world(1).shard(range(9), shuffle=False)) == [1, 3, 5, 7]


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


@pytest.mark.parametrize("count", [3, 7])
def test_a_sampler_that_yields_another_number_than_it_said_is_dealt_out(count):
    class Vague(Sampler[int]):
        def __len__(self):
            return 5

        def __iter__(self):
            return iter(range(count))

    parts = shards(Vague(), 2)
    for _ in range(2):
        assert sorted(chain(*deal(parts))) == list(range(count))
    drawing = iter(parts[0])
    next(drawing)
    parts[0].regroup([parts[0].state_dict(), {"epoch": 2, "drawn": 1}], Regrouping(0, 1, [0]))
    assert list(drawing) == list(range(2, min(count, 5)))


def test_a_dataset_may_grow_between_epochs():
    data = list(range(6))
    parts = shards(data, 2)
    data += [6, 7]
    assert sorted(chain(*deal(parts))) == data
    data.append(8)
    assert sorted(chain(*deal(parts))) == data
    assert len(parts[0]) == 5


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
        (range(2), {}, ValueError, "2 samples cannot be divided among 3 workers.*at most 2"),
        (RandomSampler(range(4), True, 10**10), {}, ValueError, "10,000,000,000 entries.*num_samples=100_000"),
        (DistributedSampler(range(8), 2, 0), {}, ValueError, r"one of 2 parts.*world\.shard\(dataset\)"),
        (range(4), {"stratify": [0, 1]}, ValueError, "2 labels for 4 samples"),
        (range(4), {"non_iid": 0.5}, ValueError, r"labels=\[\.\.\.\], non_iid=0\.5"),
        (range(4), {"labels": [0] * 4}, ValueError, "labels are for non_iid"),
        (range(4), {"labels": [0] * 4, "stratify": [0] * 4, "non_iid": 1}, ValueError, "labels are for non_iid"),
        (range(4), {"labels": [0] * 4, "non_iid": 0}, ValueError, "concentration"),
        (range(4), {"labels": [0] * 4, "non_iid": float("nan")}, ValueError, "concentration"),
        (RandomSampler(range(4)), {"labels": [0] * 4, "non_iid": 1}, TypeError, "need a dataset"),
        (RandomSampler(range(4)), {"stratify": [0, 1, 0, 1]}, TypeError, "need a dataset"),
    ],
)
def test_what_cannot_be_divided_is_refused(source, options, error, message):
    with pytest.raises(error, match=message):
        Shard(source, rank=0, size=3, **options)


def test_a_distributed_sampler_of_one_replica_is_divided():
    whole = DistributedSampler(range(6), num_replicas=1, rank=0, shuffle=False)
    assert [[*Shard(whole, rank=rank, size=2)] for rank in (0, 1)] == [[0, 2, 4], [1, 3, 5]]


def world(rank=0, size=2):
    return WorldState(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))


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
    with pytest.raises(CheckpointError, match="2 shards, but this run has 1"):
        here.load_state_dict({"shards": [kept.state_dict()] * 2})


def test_a_worlds_place_follows_its_moves():
    here = world(2, 3)
    first, second = here.shard(range(9)), here.shard(range(6), seed=1)
    there = [world(rank, 3) for rank in range(2)]
    kept = [(other.shard(range(9)), other.shard(range(6), seed=1)) for other in there]
    drawing = [iter(shard) for shard in (first, kept[1][0], second, kept[1][1])]
    for place in (0, 0, 1, 2):
        next(drawing[place])
    states = [each.state_dict()["shards"] for each in (*there, here)]
    positions = [[state[number] for state in states] for number in range(2)]
    here.move(1, 2, positions, stayed=[1, 2])
    there[1].move(0, 2, positions, stayed=[1, 2])
    assert (here.rank, here.size, here.is_first) == (1, 2, False)
    assert (there[1].rank, there[1].size, there[1].is_first) == (0, 2, True)
    assert repr(World(here)) == "World(rank=1, size=2, local_rank=2, device=device(type='cpu'))"
    assert [len([*drawing[0], *drawing[1]]), len([*drawing[2], *drawing[3]])] == [9 - 3, 6 - 1]
    assert len(here.shard(range(8))) == 4, "made after the move"


def test_a_world_tells_what_its_shards_have_trained_on():
    here = world(0, 2)
    first, second = here.shard(range(9)), here.shard(range(6))
    drawing = [iter(first), iter(second)]
    next(drawing[0])
    here.note_trained()
    assert here.state_dict()["shards"] == [{"epoch": 0, "drawn": 1}, {"epoch": 0, "drawn": 0}]
    next(drawing[0])
    assert here.state_dict()["shards"] == [{"epoch": 0, "drawn": 2, "trained": 1}, {"epoch": 0, "drawn": 0}]


def test_a_world_refuses_to_shard_a_data_loader():
    for source in (range(8), torch.arange(8)):
        with pytest.raises(TypeError, match=r"sampler=world\.shard\(loader\.dataset\)"):
            world().shard(DataLoader(source, batch_size=2))
    with pytest.raises(TypeError, match="DataLoader"):
        world().shard(TrackedLoader(DataLoader(range(8), sampler=Shard(range(8), rank=0, size=1))))


def test_a_newcomer_is_not_the_first_before_it_was_let_in():
    here = WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu"), joins=True)
    shard = here.shard(range(8))
    assert (here.is_first, len(shard)) == (False, 8)
    here.move(1, 2, [[{"epoch": 0, "drawn": 0}]], stayed=[0])
    assert (here.rank, here.is_first) == (1, False)
    here.move(0, 1, [[shard.state_dict()] * 2], stayed=[1])
    assert here.is_first


def test_a_world_cannot_be_written_to():
    here = World(world(0))
    for name in ("rank", "size", "local_rank", "device", "is_first"):
        with pytest.raises(AttributeError):
            setattr(here, name, 1)


def test_positions_of_other_shards_do_not_move_a_world():
    here = world(0, 2)
    kept = here.shard(range(8))
    with pytest.raises(CheckpointError, match=r"2 shards, but this run has 1.*before gossamer\.attach"):
        here.move(0, 1, [[kept.state_dict()] * 2] * 2, stayed=[0])
    assert (here.rank, here.size) == (0, 2)


@pytest.fixture
def alone(monkeypatch):
    """No launcher's variables, and no world yet."""
    monkeypatch.setattr(module, "_states", WeakKeyDictionary())
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
    assert current() is here._state
    assert sorted(here.shard(range(5))) == list(range(5))


def test_a_spawned_process_without_a_rank_reports_that_it_trains_alone(alone, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    with notices() as said:
        assert current().size == 1
    assert len(said) == 1
    assert "trains alone" in said[0]
    assert "gossamer.launch(train, workers=4)" in said[0]


def test_a_spawned_process_with_a_rank_is_silent(alone, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with notices() as said:
        assert current().size == 1
    assert said == []


def test_the_current_world_is_made_when_needed(alone):
    assert current() is init()._state


def test_how_long_to_wait_is_reported_with_a_unit(alone, monkeypatch):
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "60")
    with pytest.raises(TypeError, match=r"gossamer\.init\(timeout=timedelta\(minutes=30\)\)"):
        init(timeout=30)
    assert timeout_seconds() == 60
    here = init(timeout=timedelta(minutes=45))
    assert timeout_seconds() == 2700
    assert init(timeout=timedelta(hours=2)) is here
    assert timeout_seconds() == 7200


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


@pytest.mark.parametrize("options", [{}, {"non_iid": 0.3}], ids=["stratify", "non_iid"])
def test_labels_that_are_tensors_are_compared_by_value(options):
    """As in [label for _, label in dataset] of a TensorDataset; tensors are hashed by identity."""
    values = torch.arange(60).square() % 7
    labels = [label for _, label in TensorDataset(torch.zeros(60), values)]
    name = "labels" if options else "stratify"
    apart, together = (
        [[*Shard(range(60), rank=rank, size=2, **{name: each}, **options)] for rank in range(2)]
        for each in (labels, values)
    )
    assert apart == together


@pytest.mark.parametrize("labels", [3, [[1]] * 10, [torch.ones(2)] * 10, torch.ones(10, 2), torch.tensor(3), object()])
def test_invalid_labels_are_named(labels):
    with pytest.raises(TypeError, match=r"one label per sample.*world\.shard\(dataset, stratify=\["):
        Shard(range(10), rank=0, size=2, stratify=labels)


@pytest.mark.parametrize("concentration", ["0.3", [1], -1, float("nan")])
def test_an_invalid_concentration_is_named(concentration):
    with pytest.raises(ValueError, match="non_iid is the concentration"):
        Shard(range(10), rank=0, size=2, labels=[0, 1] * 5, non_iid=concentration)


def test_a_single_number_is_no_dataset():
    with pytest.raises(TypeError, match="Tensor has no length"):
        Shard(torch.tensor(3), rank=0, size=1)
