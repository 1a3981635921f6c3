"""Startup checks: what ranks are given as they begin."""

import json
import tracemalloc

import pytest
import torch
from support.virtual_workers import cluster, network, notices
from torch.utils.data import RandomSampler, Subset, TensorDataset

from gossamer.errors import MismatchError
from gossamer.train.session.startup_checks import compare, fingerprint, hand_out, optimizer_digest, report_other_data
from gossamer.train.world_state import WorldState


class Told(Exception):
    pass


def listen(text):
    raise Told(text)


class Ranks:
    """Ranks that do everything one after another; keeps what was sent."""

    def __init__(self, tensors):
        self.tensors, self.sent = tensors, []

    def texts(self):
        found = []
        for mine in self.tensors:
            with pytest.raises(Told) as told:
                hand_out(mine, listen, None)
            found.append(str(told.value))
        return found

    def hand_out(self):
        texts = self.texts()
        for mine in self.tensors:
            hand_out(mine, lambda _: texts, lambda unlike, source: self.sent.append(([*map(id, unlike)], source)))
        return self.sent


def tensors():
    return [torch.arange(4.0), torch.zeros(3, 2).t(), torch.tensor(float("nan")), torch.empty(0)]


def test_equal_tensors_are_not_broadcast():
    assert Ranks([tensors() for _ in range(3)]).hand_out() == []
    assert Ranks([[], []]).hand_out() == []


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_only_the_differing_tensor_is_broadcast(rank, place):
    ranks = Ranks([tensors() for _ in range(3)])
    ranks.tensors[rank][place].fill_(-7.0)
    sent = ranks.hand_out()
    assert [source for _, source in sent] == [0, 0, 0]
    assert [len(unlike) for unlike, _ in sent] == [1, 1, 1]


def test_a_zero_and_a_negative_zero_are_not_alike():
    ranks = Ranks([[torch.zeros(2)], [-torch.zeros(2)]])
    assert [len(unlike) for unlike, _ in ranks.hand_out()] == [1, 1]


def test_functions_in_an_optimizer_are_compared_without_their_addresses():
    def optimizer(momentum=0.0):
        group = {"params": [torch.zeros(1)], "schedule": lambda step: step, "momentum": momentum}
        return torch.optim.SGD([group], 0.1)

    first, second, other = optimizer(), optimizer(), optimizer(0.5)
    assert optimizer_digest(first) == optimizer_digest(second) != optimizer_digest(other)


def test_expanded_tensor_is_sent_without_repetition():
    """Nobody may write into what `expand` made."""
    ranks = Ranks([[torch.tensor([[1.0], [2.0]]).mul(rank).expand(2, 3)] for rank in range(2)])
    texts, heard = ranks.texts(), []
    hand_out(ranks.tensors[1], lambda _: texts, lambda unlike, _: heard.extend(unlike))
    assert [tuple(each.shape) for each in heard] == [(2, 1)]
    heard[0].copy_(torch.tensor([[8.0], [9.0]]))
    assert torch.equal(ranks.tensors[1][0], torch.tensor([[8.0] * 3, [9.0] * 3]))


@pytest.mark.parametrize("other", [[], [torch.zeros(3)] * 2, [torch.zeros(4)], [torch.zeros(3, dtype=torch.int32)]])
def test_buffers_of_another_form_are_no_buffers_to_hand_out(other):
    with pytest.raises(MismatchError, match="number, shapes or dtypes differ"):
        Ranks([[torch.zeros(3)], other]).hand_out()


def prints(**second):
    first = fingerprint(recipe="EveryStep()", layout="1", optimizer=None) | {"host": "alpha"}
    return [json.dumps(first), json.dumps(first | second)]


@pytest.mark.parametrize(("name", "value"), [("byte order", "big"), ("torch", "1.13.0"), ("gossamer", "9.9")])
def test_versions_and_platforms_that_differ_are_refused_with_both_values_and_machines(name, value):
    with pytest.raises(MismatchError) as refused:
        compare(prints(**{name: value, "host": "beta"}))
    text = str(refused.value)
    assert f"'{value}' on rank 1" in text
    assert "machines are 'alpha' on rank 0, 'beta' on rank 1" in text


def test_machines_alone_may_differ():
    compare(prints(host="beta"))


class Shuffled:
    """Like a dataset of PyTorch Geometric: `shuffle()` and slices store indices in `_indices`."""

    def __init__(self, rows, indices):
        self._rows, self._indices = rows, indices

    def __len__(self):
        return len(self._rows if self._indices is None else self._indices)

    def __getitem__(self, index):
        return self._rows[index if self._indices is None else self._indices[index]]


SPLITS = {
    "as many in another order": lambda rank: Subset(range(8), [*range(4)] if rank else [*range(3, -1, -1)]),
    "more": lambda rank: range(8 + rank),
    "other rows": lambda rank: TensorDataset(torch.arange(8.0) + rank),
    "shuffled by itself": lambda rank: Shuffled(range(8), [3, 1, 2, 0] if rank else [*range(4)]),
    "a subset of others": lambda rank: Subset(TensorDataset(torch.arange(8.0) + rank), [0, 1]),
}
SAME = {
    "subset": lambda rank: Subset(range(8), [0, 1, 2]),
    "shuffled by itself alike": lambda rank: Shuffled(range(8), [3, 1, 2, 0]),
    "not shuffled": lambda rank: Shuffled(range(8), None),
    "tensors": lambda rank: TensorDataset(torch.arange(8.0), torch.eye(8).to_sparse()),
    "sampler": lambda rank: RandomSampler(range(8)),
    "keys": lambda rank: Subset({"a": 1, "b": 2}, ["b", "a"]),
}


def shards(rank, make):
    world = WorldState(rank=rank, size=2, local_rank=rank, device=torch.device("cpu"))
    shard = world.shard(make(rank))
    assert len(shard) > 0
    return world.data()


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_with_different_data_are_named(split):
    with notices() as said:
        report_other_data([shards(rank, SPLITS[split]) for rank in range(2)])
    (line,) = said
    assert "rank 0" in line
    assert "rank 1" in line
    assert "random_split" in line


@pytest.mark.parametrize("split", SAME)
def test_ranks_with_the_same_data_are_not_named(split):
    with notices() as said:
        report_other_data([shards(rank, SAME[split]) for rank in range(2)])
        report_other_data([["4 samples"], ["4 samples", "9 samples"]])
    assert said == []


def test_large_rows_are_compared_without_a_copy_of_them_as_numbers():
    rows = TensorDataset(torch.zeros(16, 2**17))
    tracemalloc.start()
    shards(0, lambda rank: rows)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * rows.tensors[0].nbytes


def test_sessions_compare_their_data():
    def work(worker):
        make = SPLITS["other rows"]
        world = WorldState(rank=worker.rank, size=2, local_rank=worker.rank, device=torch.device("cpu"))
        kept = world.shard(make(worker.rank))
        model = network(0)
        worker.attach(model, torch.optim.SGD(model.parameters(), 0.1), world=world)
        return len(kept)

    with notices() as said:
        cluster(work, 2)
    assert len(said) == 1
