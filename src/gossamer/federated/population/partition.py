"""Partition: gives every sample of a dataset to one device, so that devices are as unlike as asked."""

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

LABEL_ATTRIBUTES = ("targets", "labels")  # of datasets that know their labels without loading samples
LABEL_KEYS = ("label", "labels", "target", "targets", "y")  # of samples that are mappings


def count_samples(data: Any) -> int:
    """How many samples there are. Raises ValueError for what has no length."""
    if isinstance(data, Sized) and getattr(data, "ndim", 1) > 0:
        return len(data)
    raise ValueError(
        f"a {type(data).__name__} has no length, so its samples cannot be numbered and given away: pass a map-style "
        "dataset, or its labels as a tensor, an array or a list"
    )


def codes(data: Any) -> list[int]:
    """A number from 0 for each sample's label, in the order of their first appearance. Raises ValueError."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(label, len(seen)) for label in labels(data)]


def labels(data: Any) -> list[Any]:
    """Each sample's label, as a plain number or text. Raises ValueError where there are none to find."""
    found = _label_source(data)
    if isinstance(found, Tensor | np.ndarray):
        if found.ndim != 1:
            raise ValueError(
                f"labels have one number a sample, shape (n,), and these have shape {tuple(found.shape)}: write "
                "partition(labels, ...), or labels.argmax(1) where they are one-hot"
            )
        found = found.tolist()
    return [_plain(label, place) for place, label in enumerate(found)]


def bins(data: Any, count: int) -> list[int]:
    """Which of `count` bins each sample lies in, as many samples in each, by where it lies along the inputs' first
    principal component; by itself where a sample is one number. Raises ValueError."""
    places = np.argsort(_projected(_inputs(data)), kind="stable")
    found = np.empty(len(places), dtype=np.int64)
    found[places] = np.arange(len(places)) * count // max(len(places), 1)
    return [int(each) for each in found]


def _label_source(data: Any) -> Any:
    """A tensor, an array or a list of labels; those of single samples are looked at where nothing else tells."""
    if isinstance(data, Subset):
        every = _label_source(data.dataset)
        return [every[index] for index in data.indices]
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    if isinstance(data, Tensor | np.ndarray):
        return data
    for name in LABEL_ATTRIBUTES:
        if hasattr(data, name):
            return getattr(data, name)
    return [_sample_label(data[index]) for index in range(count_samples(data))]


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
            raise ValueError(f"the label of sample {place} has shape {tuple(label.shape)}, and a label is one number")
        label = label.item()
    if isinstance(label, float) and not isfinite(label):
        raise ValueError(f"the label of sample {place} is {label}: leave such samples out, or give them a label")
    if not isinstance(label, int | float | str | bytes):
        raise ValueError(
            f"the label of sample {place} is a {type(label).__name__}, and labels are numbers or texts: pass them "
            "themselves, partition(labels, ...)"
        )
    return label


def _inputs(data: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(n, d)."""
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
            f"by='feature' compares inputs, and these are no numbers of one shape ({error}): pass one number a sample "
            "that tells who is alike, such as its length or its writer"
        ) from error
    if not np.isfinite(found).all():
        raise ValueError("by='feature' compares inputs, and some are not finite: leave those samples out")
    return found.reshape(len(found), -1)


def _sample_input(sample: Any, place: int) -> Any:
    first = sample[0] if isinstance(sample, tuple | list) and sample else sample
    if isinstance(first, Mapping):
        raise ValueError(
            f"sample {place} is a mapping, so which of its entries to go by is unknown: pass them, "
            "partition(torch.stack([sample['image'] for sample in dataset]), clients, by='feature')"
        )
    return np.asarray(first)


def _projected(inputs: np.ndarray[Any, np.dtype[np.float64]]) -> Sequence[float] | Any:
    """(n,): along the first principal component."""
    if inputs.shape[1] <= 1:
        return inputs.reshape(-1)
    centered = inputs - inputs.mean(axis=0)
    _, vectors = np.linalg.eigh(centered.T @ centered)
    first = vectors[:, -1]
    return centered @ (first * np.sign(first[np.argmax(np.abs(first))]))  # the sign is the library's choice otherwise


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
    """Which samples each device holds: ascending indices by device, every sample at one device.

    by="dirichlet"  of each label a share p_k to device k, p ~ Dirichlet(alpha, ..., alpha); a small alpha: few labels
                    a device (Hsu et al. 2019, arXiv:1909.06335; Yurochkin et al. 2019, ICML)
    by="shards"     sorted by label and cut in clients x `shards` pieces, of which a device gets `shards`
                    (McMahan et al. 2017, AISTATS)
    by="quantity"   labels alike, but sizes n p_k, p ~ Dirichlet(alpha) (Li et al. 2022, ICDE)
    by="feature"    as "dirichlet", of `bin_count` bins of inputs that lie alike along their first principal component,
                    in place of labels; of the values themselves where a sample is one number

    dataset_or_labels: a map-style dataset, or its labels (n,), as tensor, array or list; for "feature" a dataset, or
    inputs (n, ...); for "quantity" anything with a length. Datasets with `targets` or `labels` are not loaded.
    fewest: samples that every device has at least; those that lack some get them from whoever has most.
    The same arguments give the same lists on every machine. Raises ValueError for what cannot be divided so.
    """
    total = count_samples(dataset_or_labels)
    rules: dict[str, Callable[[Random], Parts]] = {
        "dirichlet": lambda random: _by_group(codes(dataset_or_labels), clients, alpha, random),
        "shards": lambda random: _by_shards(codes(dataset_or_labels), clients, shards, random),
        "quantity": lambda random: _cut([*_shuffled(range(total), random)], _shares(clients, alpha, random)),
        "feature": lambda random: _by_group(bins(dataset_or_labels, bin_count), clients, alpha, random),
    }
    require(by in rules, f"by is one of {', '.join(rules)}, not {by!r}: write partition(labels, 100, 'dirichlet')")
    require(type(clients) is int and clients >= 1, f"clients is 1 or more, not {clients!r}")
    require(
        isfinite(alpha) and alpha > 0,
        f"alpha is above 0 and finite, not {alpha}: 0.1 makes devices very unlike, 100 nearly alike",
    )
    require(type(fewest) is int and fewest >= 0, f"fewest counts samples, 0 or more, not {fewest!r}")
    require(type(bin_count) is int and bin_count >= 1, f"bin_count is 1 or more, not {bin_count!r}")
    require(type(shards) is int and shards >= 1, f"shards is 1 or more of a device, not {shards!r}")
    require(
        clients * fewest <= total,
        f"{total} samples cannot give {clients} clients {fewest} each: write partition(..., clients="
        f"{total // max(fewest, 1)}), or fewest=0 where a device may have none",
    )
    require(
        by != "shards" or clients * shards <= total,
        f"{total} samples cannot be cut in {clients} x {shards} shards: write shards={max(total // clients, 1)}",
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
    """Dirichlet(alpha, ..., alpha) by gamma draws; their logarithms, since small alphas draw what no float holds."""
    draws = [_log_gamma_draw(alpha, random) for _ in range(clients)]
    largest = max(draws)
    raw = [exp(draw - largest) for draw in draws]
    whole = sum(raw)
    return [each / whole for each in raw]


def _log_gamma_draw(alpha: float, random: Random) -> float:
    """log of Gamma(alpha, 1): Gamma(alpha + 1, 1) U^(1 / alpha) (Marsaglia & Tsang 2000, TOMS)."""
    return log(random.gammavariate(alpha + 1, 1.0)) + log(1.0 - random.random()) / alpha


def _cut(items: Sequence[int], shares: Sequence[float]) -> Parts:
    """Items in pieces of about these shares, which add up to 1."""
    ends = [min(round(total * len(items)), len(items)) for total in accumulate(shares)]
    ends[-1] = len(items)
    return [list(items[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _level_up(parts: Parts, fewest: int) -> None:
    """Devices with fewer than that take from whoever has most."""
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
