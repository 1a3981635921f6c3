"""Dirichlet shards: unequal labels, every sample on one rank, the same everywhere."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_workers import notices
from torch.utils.data import DataLoader

from gossamer.train.sampler import Shard, dirichlet_split, taken_up
from gossamer.train.sampler.position import Regrouping
from gossamer.train.world_state import WorldState


def shards(labels: Any, size: int, concentration: float, seed: int = 0) -> list[Shard]:
    source = range(len(labels))
    return [
        Shard(source, rank=rank, size=size, labels=labels, non_iid=concentration, seed=seed) for rank in range(size)
    ]


@given(st.lists(st.sampled_from("abcd"), min_size=5, max_size=60), st.integers(1, 5), st.floats(1e-6, 1e6))
def test_every_sample_is_on_one_rank_and_none_is_empty(labels: list[str], size: int, concentration: float) -> None:
    parts = shards(labels, size, concentration)
    for _ in range(2):
        dealt = [list(part) for part in parts]
        assert sorted(chain(*dealt)) == list(range(len(labels)))
        assert [len(part) for part in dealt] == [len(part) for part in parts]
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        assert min(map(len, dealt)) >= 1


def test_a_rank_keeps_its_samples_and_shuffles_them() -> None:
    labels = torch.arange(200) % 10
    (first, again), (other, _) = (shards(labels, 2, 0.5, seed) for seed in (3, 3)), shards(labels, 2, 0.5, 4)
    epochs = [list(first[0]) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert [list(again[0]) for _ in range(2)] == epochs  # whoever works it out
    assert sorted(other) != sorted(epochs[0])


def frequencies(concentration: float, size: int = 10, per_label: int = 400) -> np.ndarray:
    """(ranks, labels), of ten labels."""
    classes = torch.arange(10 * per_label) % 10
    owners = dirichlet_split(classes, size, concentration, seed=1)
    counts = np.array([np.bincount(classes[owners == rank].numpy(), minlength=10) for rank in range(size)])
    return counts / counts.sum(1, keepdims=True)


def test_a_large_concentration_is_nearly_equal_and_a_small_one_leaves_few_labels() -> None:
    equal, few = frequencies(1e5), frequencies(0.01)
    assert np.abs(equal - 0.1).max() < 0.06
    assert np.median(few.max(1)) > 0.5  # some had to share a label
    largest = [np.sort(frequencies(each), 1)[:, -1].mean() for each in (0.1, 1.0, 10.0, 100.0)]
    assert largest == sorted(largest, reverse=True)


def test_shares_are_those_of_a_dirichlet_distribution() -> None:
    """Two labels of frequency 1/2: a rank's share of one is Beta(c/2, c/2), of variance 1 / (4 (c + 1)).

    Many ranks with few samples each leave enough of both labels for almost all turns.
    """
    concentration, size, each = 3.0, 400, 50
    classes = torch.arange(size * each) % 2
    owners = dirichlet_split(classes, size, concentration)
    share = np.bincount(owners[classes == 1].numpy(), minlength=size) / each
    binomial = 1 / (4 * each) * concentration / (concentration + 1)  # of drawing `each` samples by that share
    assert abs(share.mean() - 0.5) < 1e-9
    assert share.var() == pytest.approx(1 / (4 * (concentration + 1)) + binomial, rel=0.15)


def test_labels_that_are_rare_are_rare_on_average() -> None:
    """The prior is the labels' own frequency."""
    classes = (torch.arange(8000) % 8 == 0).long()
    owners = dirichlet_split(classes, 200, 2.0)
    share = np.bincount(owners[classes == 1].numpy(), minlength=200) / 40
    assert share.mean() == pytest.approx(1 / 8)
    assert np.median(share) < 1 / 8  # skewed: most ranks have few


def test_it_resumes_and_goes_through_a_loader() -> None:
    labels = torch.arange(40) % 4

    def loader() -> tuple[WorldState, DataLoader[Any]]:
        world = WorldState(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
        return world, DataLoader(labels, 5, sampler=world.shard(labels, labels=labels, non_iid=0.2))

    _, batches = loader()
    expected = [batch.tolist() for batch in batches]
    stopped, begun = loader()
    first = next(iter(begun)).tolist()
    resumed, batches = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert [first, *(batch.tolist() for batch in batches)] == expected


def test_who_stays_keeps_its_samples_and_continues_in_the_epoch() -> None:
    labels = torch.arange(60) % 4
    parts = shards(labels, 3, 0.5)
    expected = [list(part) for part in shards(labels, 3, 0.5)]
    drawing = [iter(part) for part in parts]
    seen = [[next(each) for _ in range(5)] for each in drawing]
    states = [part.state_dict() for part in parts]
    with notices() as said:
        for rank, old in enumerate((1, 2)):
            parts[old].regroup(states, Regrouping(rank, 2, [1, 2]))
    assert len([line for line in said if "non_iid" in line]) == 1
    state = parts[2].state_dict()
    assert state == {"epoch": 0, "drawn": 5, "own": [2, 3]}
    for old in (1, 2):
        assert seen[old] + list(drawing[old]) == expected[old]
    again = shards(labels, 2, 0.5)[1]
    again.load_state_dict(state)
    assert seen[2] + list(again) == expected[2], "resumed as rank 1 of 2"
    assert again.state_dict() == {"epoch": 0, "drawn": 20, "own": [2, 3]}
    assert sorted(again) == sorted(expected[2])


def test_a_newcomer_begins_in_the_epoch_of_the_others() -> None:
    labels = torch.arange(60) % 4
    newcomer = Shard(range(60), rank=2, size=3, labels=labels, non_iid=0.5)
    newcomer.regroup([{"epoch": 4, "drawn": 7}, {"epoch": 4, "drawn": 7}], Regrouping(2, 3, [0, 1]))
    assert newcomer.state_dict() == {"epoch": 4, "drawn": 0, "own": [2, 3]}
    assert len(list(newcomer)) == 20
    late = Shard(range(60), rank=2, size=3, labels=labels, non_iid=0.5)
    late.regroup([{"epoch": 4, "drawn": 30}, {"epoch": 4, "drawn": 30}], Regrouping(2, 3, [0, 1]))
    next(iter(late))
    assert late.epoch == 5


def test_another_number_of_workers_takes_up_the_number_of_samples() -> None:
    labels = torch.arange(60) % 4
    states = []
    for count, part in zip((4, 4, 5), shards(labels, 3, 0.5), strict=True):
        for _ in zip(range(count), part, strict=False):
            pass
        states.append(part.state_dict())
    for rank, (part, drawn) in enumerate(zip(shards(labels, 2, 0.5), (7, 6), strict=True)):
        part.load_state_dict(taken_up(states, rank, 2))
        assert part.state_dict() == {"epoch": 0, "drawn": drawn}
