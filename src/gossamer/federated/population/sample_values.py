"""Sample values: reads what a partition goes by, labels or inputs, from datasets, tensors, arrays and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from math import isfinite
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

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
