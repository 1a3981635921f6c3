"""Partition: every sample at one device, the same on every machine, and as unlike as alpha says."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from gossamer.federated import partition
from gossamer.federated.population.partition import By, _shares, codes

LABELS = torch.arange(1000) % 10
RULES: list[By] = ["dirichlet", "shards", "quantity", "feature"]


def is_partition(parts: list[list[int]], total: int) -> bool:
    return sorted(chain.from_iterable(parts)) == list(range(total))


@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("clients", [1, 7, 100])
def test_every_sample_is_at_one_device_and_every_device_has_some(by: By, alpha: float, clients: int) -> None:
    parts = partition(LABELS, clients, by, alpha=alpha, fewest=3)
    assert is_partition(parts, 1000)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 3
    assert all(part == sorted(part) for part in parts)


def test_a_sample_at_two_devices_is_seen() -> None:
    parts = partition(LABELS, 5)
    assert not is_partition([*parts[:-1], parts[0]], 1000)


@pytest.mark.parametrize("by", RULES)
def test_the_same_seed_gives_the_same_lists_and_another_gives_others(by: By) -> None:
    assert partition(LABELS, 20, by, seed=3) == partition(LABELS, 20, by, seed=3)
    assert partition(LABELS, 20, by, seed=3) != partition(LABELS, 20, by, seed=4)


def test_lists_are_what_they_were() -> None:
    """On any machine: drawn by Python's own generator from an address."""
    assert partition([0, 0, 0, 0, 1, 1, 1, 1], 3, alpha=0.5, seed=1) == [[5, 6, 7], [4], [0, 1, 2, 3]]


def labels_a_device(alpha: float) -> float:
    return sum(len({int(LABELS[index]) for index in part}) for part in partition(LABELS, 20, alpha=alpha)) / 20


def test_a_small_alpha_makes_devices_unlike() -> None:
    few, some, all_ten = labels_a_device(0.05), labels_a_device(0.5), labels_a_device(1000)
    assert few < 4 < some < 9.5 < all_ten


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_shares_have_the_mean_and_variance_of_a_dirichlet(alpha: float) -> None:
    from random import Random

    clients, draws = 8, 4000
    random = Random(1)
    drawn = np.array([_shares(clients, alpha, random)[0] for _ in range(draws)])
    mean, variance = 1 / clients, (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert abs(drawn.mean() - mean) < 4.5 * sqrt(variance / draws)
    fourth = ((drawn - mean) ** 4).mean()
    z = (drawn.var() - variance) / sqrt((fourth - variance**2) / draws)
    assert abs(z) < 4.5
    wrong = (drawn.var() - (clients - 1) / (clients**2 * (alpha + 1))) / sqrt((fourth - variance**2) / draws)
    assert abs(wrong) > 4.5  # the twin: alpha divided by the number of clients


def test_shards_give_two_labels_a_device() -> None:
    parts = partition(LABELS, 50, "shards")
    assert {len(part) for part in parts} == {20}
    assert max(len({int(LABELS[index]) for index in part}) for part in parts) <= 2


def test_quantity_divides_labels_alike_and_sizes_unlike() -> None:
    parts = partition(torch.arange(20_000) % 2, 10, "quantity", alpha=0.5)
    sizes = [len(part) for part in parts]
    assert max(sizes) > 4 * min(sizes)
    z = [(sum(index % 2 for index in part) - len(part) / 2) / sqrt(len(part) / 4) for part in parts]
    assert max(map(abs, z)) < 4.5


def test_quantity_needs_no_labels() -> None:
    class Unlabeled(Dataset[int]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> int:
            raise AssertionError("nothing is loaded")

    assert is_partition(partition(Unlabeled(), 4, "quantity"), 30)


def test_feature_keeps_alike_inputs_together() -> None:
    """Inputs on a line in a space of many dimensions: bins are stretches of it."""
    places = torch.rand(600, generator=torch.Generator().manual_seed(0))
    inputs = places[:, None] * torch.linspace(-1, 1, 12)
    parts = partition(inputs, 30, "feature", alpha=0.02)
    within = np.mean([float(places[part].var()) for part in parts if len(part) > 1])
    assert within < 0.4 * float(places.var())
    mixed = partition(inputs, 30, "feature", alpha=1e6)
    assert np.mean([float(places[part].var()) for part in mixed]) > 0.8 * float(places.var())
    assert partition(TensorDataset(inputs, LABELS[:600]), 30, "feature", alpha=0.02) == parts


class Known(Dataset[Any]):
    """Knows its labels without loading a sample."""

    targets = LABELS.tolist()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nothing is loaded")


class Asked(Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return self.make(LABELS[index])


class Named(Asked):
    """Has the names of its classes, and no list of its targets."""

    targets, labels = None, ("cat", "dog")


@pytest.mark.parametrize(
    "data",
    [
        LABELS.tolist(),
        LABELS.numpy(),
        LABELS.double(),
        [str(int(label)) for label in LABELS],
        TensorDataset(torch.zeros(1000, 2), LABELS),
        Known(),
        Asked(lambda label: (torch.zeros(2), label)),
        Asked(lambda label: {"image": 0, "label": int(label)}),
        Asked(lambda label: (0, np.int64(int(label)))),
        Named(lambda label: (0, int(label))),
        Subset(TensorDataset(torch.zeros(2000, 2), LABELS.repeat(2)), range(1000)),
        Subset(Known(), range(1000)),
    ],
)
def test_labels_are_found_wherever_they_are(data: Any) -> None:
    assert partition(data, 9) == partition(LABELS, 9)


def test_labels_are_numbered_in_order_of_appearance() -> None:
    assert codes(["b", "a", "b", "c"]) == [0, 1, 0, 2]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 1


@pytest.mark.parametrize(
    ("data", "options", "told"),
    [
        (LABELS, {"clients": 0}, "clients must be 1 or more"),
        (LABELS, {"clients": 2.5}, "clients must be 1 or more"),
        (LABELS, {"clients": 5, "by": "writer"}, "by must be one of dirichlet, shards"),
        (LABELS, {"clients": 5, "alpha": 0.0}, "alpha must be above 0"),
        (LABELS, {"clients": 5, "alpha": float("nan")}, "alpha must be above 0"),
        (LABELS, {"clients": 1001}, "clients=1000"),
        (LABELS, {"clients": 10, "fewest": 101}, "clients=9"),
        (LABELS, {"clients": 400, "by": "shards", "shards": 3}, "shards=2"),
        (LABELS, {"clients": 5, "by": "shards", "shards": 0}, "shards must be 1 or more"),
        (LABELS, {"clients": 5, "by": "feature", "bin_count": 0}, "bin_count must be 1 or more"),
        (torch.zeros(20, 10), {"clients": 5}, r"shape \(n,\).*argmax"),
        (torch.tensor(3), {"clients": 5}, "no length"),
        (Endless(), {"clients": 5}, "map-style"),
        ([1.0, float("nan"), 2.0], {"clients": 2}, "sample 1 is nan"),
        ([{"picture": 1}], {"clients": 1}, "picture.*none of"),
        ([object()], {"clients": 1}, "sample 0 is a object"),
        ([(1, [1, 2])], {"clients": 1}, "sample 0 is a list"),
        ([(1, torch.zeros(2))], {"clients": 1}, r"sample 0 has shape \(2,\)"),
        ([("a", 1), ("b", 2)], {"clients": 2, "by": "feature"}, "no numbers of one shape"),
        ([torch.zeros(2), torch.zeros(3)], {"clients": 2, "by": "feature"}, "no numbers of one shape"),
        ([{"image": 0}], {"clients": 1, "by": "feature"}, "sample 0 is a mapping"),
        (torch.tensor([[1.0], [float("inf")]]), {"clients": 2, "by": "feature"}, "not finite"),
    ],
)
def test_what_cannot_be_divided_is_refused(data: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        partition(data, **options)


def test_nobody_is_poor_where_one_holds_nearly_everything() -> None:
    parts = partition([0] * 500, 100, alpha=1e-6, fewest=5)
    assert Counter(map(len, parts)) == {5: 100}


def test_ten_thousand_devices_are_no_burden() -> None:
    assert is_partition(partition(np.arange(50_000) % 10, 10_000), 50_000)
