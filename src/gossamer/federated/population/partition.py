"""Partition: assigns every sample of a dataset to one device, with a chosen degree of heterogeneity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import exp, isfinite, log
from random import Random
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from gossamer.base import rng
from gossamer.errors import require

LABEL_ATTRIBUTES = ("targets", "labels")  # of datasets that have a label for each sample without loading it
LABEL_KEYS = ("label", "labels", "target", "targets", "y")  # of samples that are mappings


def count_samples(data: Any) -> int:
    """Number of samples. Raises ValueError for data without a length."""
    if isinstance(data, Sized) and getattr(data, "ndim", 1) > 0:
        return len(data)
    raise ValueError(
        f"a {type(data).__name__} has no length, so its samples cannot be assigned: pass a map-style "
        "dataset, or its labels as a tensor, an array or a list"
    )


def codes(data: Any) -> list[int]:
    """An integer from 0 for each sample's label, in order of first appearance. Raises ValueError."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(label, len(seen)) for label in labels(data)]


def labels(data: Any) -> list[Any]:
    """Each sample's label, as a plain number or text. Raises ValueError if there are no labels."""
    found = _label_source(data)
    if isinstance(found, Tensor | np.ndarray):
        if found.ndim != 1:
            raise ValueError(
                f"labels must have shape (n,), one number per sample, but these have shape {tuple(found.shape)}: write "
                "partition(labels, ...), or labels.argmax(1) if they are one-hot"
            )
        found = found.tolist()
    return [_plain(label, place) for place, label in enumerate(found)]


def bins(data: Any, count: int) -> list[int]:
    """Divide samples into `count` bins of equal size, along the first principal component of the inputs (or by value,
    if a sample is one number). Returns the bin of each sample. Raises ValueError."""
    places = np.argsort(_projected(_inputs(data)), kind="stable")
    found = np.empty(len(places), dtype=np.int64)
    found[places] = np.arange(len(places)) * count // max(len(places), 1)
    return [int(each) for each in found]


def _label_source(data: Any) -> Any:
    """Labels as a tensor, an array or a list. Samples are loaded only if there is no other source."""
    if isinstance(data, Subset):
        every = _label_source(data.dataset)
        return [every[index] for index in data.indices]
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    if isinstance(data, Tensor | np.ndarray):
        return data
    for name in LABEL_ATTRIBUTES:
        if _is_one_each(found := getattr(data, name, None), data):
            return found
    return [_sample_label(data[index]) for index in range(count_samples(data))]


def _is_one_each(found: Any, data: Any) -> bool:
    """Whether there is a label for each sample. Some datasets have the names of their classes in `labels`, or None."""
    return isinstance(found, Sized) and getattr(found, "ndim", 1) > 0 and len(found) == count_samples(data)


def _sample_label(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        key = next((key for key in LABEL_KEYS if key in sample), None)
        if key is None:
            raise ValueError(
                f"a sample has {sorted(map(str, sample))} and none of {list(LABEL_KEYS)}, so its label is unknown: "
                "pass the labels themselves, partition([sample['class'] for sample in dataset], ...)"
            )
        return sample[key]
    return sample[-1] if isinstance(sample, tuple | list) and sample else sample


def _plain(label: Any, place: int) -> Any:
    if isinstance(label, Tensor | np.generic | np.ndarray):
        if (label.numel() if isinstance(label, Tensor) else label.size) != 1:
            raise ValueError(f"the label of sample {place} has shape {tuple(label.shape)}, but must be one number")
        label = label.item()
    if isinstance(label, float) and not isfinite(label):
        raise ValueError(f"the label of sample {place} is {label}: leave such samples out, or give them a label")
    if not isinstance(label, int | float | str | bytes):
        raise ValueError(
            f"the label of sample {place} is a {type(label).__name__}, but labels must be numbers or texts: pass them "
            "directly, partition(labels, ...)"
        )
    return label


def _inputs(data: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Inputs as (n, d)."""
    if isinstance(data, Subset):
        return _inputs(data.dataset)[list(data.indices)]
    if isinstance(data, TensorDataset):
        data = data.tensors[0]
    if not isinstance(data, Tensor | np.ndarray):
        data = [_sample_input(data[index], index) for index in range(count_samples(data))]
    try:
        found = np.asarray(data.detach().cpu() if isinstance(data, Tensor) else data, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"by='feature' compares inputs, but these are no numbers of one shape ({error}): pass one number per "
            "sample that describes its similarity to others, such as its length or its writer"
        ) from error
    if not np.isfinite(found).all():
        raise ValueError("by='feature' compares inputs, but some are not finite: leave those samples out")
    return found.reshape(len(found), -1)


def _sample_input(sample: Any, place: int) -> Any:
    first = sample[0] if isinstance(sample, tuple | list) and sample else sample
    if isinstance(first, Mapping):
        raise ValueError(
            f"sample {place} is a mapping, so its input is unknown: pass the inputs, "
            "partition(torch.stack([sample['image'] for sample in dataset]), clients, by='feature')"
        )
    return np.asarray(first)


def _projected(inputs: np.ndarray[Any, np.dtype[np.float64]]) -> Sequence[float] | Any:
    """Inputs (n, d) projected on their first principal component: (n,)."""
    if inputs.shape[1] <= 1:
        return inputs.reshape(-1)
    centered = inputs - inputs.mean(axis=0)
    _, vectors = np.linalg.eigh(centered.T @ centered)
    first = vectors[:, -1]
    return centered @ (first * np.sign(first[np.argmax(np.abs(first))]))  # fix the sign, which depends on the library


By = Literal["dirichlet", "shards", "quantity", "feature"]
Parts = list[list[int]]


def partition(
    dataset_or_labels: Any,
    clients: int,
    by: By = "dirichlet",
    *,
    alpha: float = 0.5,
    seed: int = 0,
    fewest: int = 1,
    shards: int = 2,
    bin_count: int = 10,
) -> Parts:
    """Assign every sample to one device.

    by="dirichlet"  shares p_k of each label to device k, p ~ Dirichlet(alpha, ..., alpha); a small alpha gives each
                    device few labels (Hsu et al. 2019, arXiv:1909.06335; Yurochkin et al. 2019, ICML)
    by="shards"     sorted by label and cut into clients x `shards` pieces; each device gets `shards` of them
                    (McMahan et al. 2017, AISTATS)
    by="quantity"   the same distribution of labels, sizes n p_k, p ~ Dirichlet(alpha) (Li et al. 2022, ICDE)
    by="feature"    like "dirichlet", with `bin_count` bins along the first principal component of the inputs in place
                    of labels (or bins of the values, if a sample is one number)

    Args:
        dataset_or_labels: a map-style dataset, or its labels (n,) as tensor, array or list. For "feature", a dataset or
            inputs (n, ...). For "quantity", anything with a length. The samples of datasets with as many `targets` or
            `labels` are not loaded.
        clients: number of devices, 1 or more.
        by: the rule.
        alpha: concentration, above 0: 0.1 makes devices very different, 100 nearly equal.
        seed: of the draws.
        fewest: smallest number of samples per device. Missing ones are moved from the devices with the most samples.
        shards: pieces per device, for "shards".
        bin_count: number of bins, for "feature".

    Returns:
        Ascending indices of each device's samples, the same on every machine.

    Raises:
        ValueError: an argument is out of range, or the data cannot be divided by this rule.

    >>> from gossamer.federated import partition
    >>> partition([0, 0, 0, 1, 1, 1], clients=2, by="shards", shards=1)
    [[0, 1, 2], [3, 4, 5]]
    """
    total = count_samples(dataset_or_labels)
    rules: dict[str, Callable[[Random], Parts]] = {
        "dirichlet": lambda random: _by_group(codes(dataset_or_labels), clients, alpha, random),
        "shards": lambda random: _by_shards(codes(dataset_or_labels), clients, shards, random),
        "quantity": lambda random: _cut([*_shuffled(range(total), random)], _shares(clients, alpha, random)),
        "feature": lambda random: _by_group(bins(dataset_or_labels, bin_count), clients, alpha, random),
    }
    require(by in rules, f"by must be one of {', '.join(rules)}, got {by!r}: write partition(labels, 100, 'dirichlet')")
    require(type(clients) is int and clients >= 1, f"clients must be 1 or more, got {clients!r}")
    require(
        isfinite(alpha) and alpha > 0,
        f"alpha must be above 0 and finite, got {alpha}: 0.1 makes devices very different, 100 nearly equal",
    )
    require(type(fewest) is int and fewest >= 0, f"fewest must be 0 or more samples, got {fewest!r}")
    require(type(bin_count) is int and bin_count >= 1, f"bin_count must be 1 or more, got {bin_count!r}")
    require(type(shards) is int and shards >= 1, f"shards must be 1 or more per device, got {shards!r}")
    require(
        clients * fewest <= total,
        f"{total} samples cannot give {clients} clients {fewest} each: write partition(..., clients="
        f"{total // max(fewest, 1)}), or fewest=0 if a device may have none",
    )
    require(
        by != "shards" or clients * shards <= total,
        f"{total} samples cannot be cut into {clients} x {shards} shards: write shards={max(total // clients, 1)}",
    )
    parts = rules[by](Random(rng.address(seed, "partition", by, clients)))
    _level_up(parts, fewest)
    return [sorted(part) for part in parts]


def _by_group(groups: Sequence[int], clients: int, alpha: float, random: Random) -> Parts:
    parts: Parts = [[] for _ in range(clients)]
    members: list[list[int]] = [[] for _ in range(max(groups, default=-1) + 1)]
    for index, group in enumerate(groups):
        members[group].append(index)
    for own in members:
        for part, more in zip(parts, _cut(_shuffled(own, random), _shares(clients, alpha, random)), strict=True):
            part += more
    return parts


def _by_shards(groups: Sequence[int], clients: int, shards: int, random: Random) -> Parts:
    places = sorted(_shuffled(range(len(groups)), random), key=groups.__getitem__)
    pieces = _cut(places, [1 / (clients * shards)] * (clients * shards))
    owners = [*_shuffled(range(len(pieces)), random)]
    return [[index for owned in owners[k::clients] for index in pieces[owned]] for k in range(clients)]


def _shuffled(items: Iterable[int], random: Random) -> list[int]:
    mixed = list(items)
    random.shuffle(mixed)
    return mixed


def _shares(clients: int, alpha: float, random: Random) -> list[float]:
    """Dirichlet(alpha, ..., alpha) by gamma draws, as logarithms, since draws for small alphas underflow."""
    draws = [_log_gamma_draw(alpha, random) for _ in range(clients)]
    largest = max(draws)
    raw = [exp(draw - largest) for draw in draws]
    whole = sum(raw)
    return [each / whole for each in raw]


def _log_gamma_draw(alpha: float, random: Random) -> float:
    """log of Gamma(alpha, 1): Gamma(alpha + 1, 1) U^(1 / alpha) (Marsaglia & Tsang 2000, TOMS)."""
    return log(random.gammavariate(alpha + 1, 1.0)) + log(1.0 - random.random()) / alpha


def _cut(items: Sequence[int], shares: Sequence[float]) -> Parts:
    """Cut items into pieces of about these shares, which add up to 1."""
    ends = [min(round(total * len(items)), len(items)) for total in accumulate(shares)]
    ends[-1] = len(items)
    return [list(items[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _level_up(parts: Parts, fewest: int) -> None:
    """Move samples from the largest devices to those with fewer than `fewest`."""
    rich = [(-len(part), k) for k, part in enumerate(parts)]
    heapify(rich)
    for part in parts:
        while len(part) < fewest:
            size, k = heappop(rich)
            if -size != len(parts[k]):  # it grew since
                heappush(rich, (-len(parts[k]), k))
                continue
            part.append(parts[k].pop())
            heappush(rich, (-len(parts[k]), k))
