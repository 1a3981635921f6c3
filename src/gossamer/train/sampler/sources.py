"""Sources: length and labels of the data that a sampler divides."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

Labels = Iterable[Hashable] | Tensor


def length_of(source: Any) -> int:
    if isinstance(source, DataLoader) or hasattr(source, "collate_fn"):  # session.track returns another loader class
        raise TypeError(
            "world.shard takes a dataset, a stream or a sampler, but this is a DataLoader, which yields batches. Write "
            "DataLoader(loader.dataset, batch_size=..., sampler=world.shard(loader.dataset)), or for a loader over a "
            "stream DataLoader(world.shard(stream), batch_size=...)."
        )
    scalar = isinstance(source, Tensor) and not source.dim()
    if isinstance(source, IterableDataset) or scalar or not hasattr(source, "__len__"):
        raise TypeError(
            f"{type(source).__name__} has no length or cannot be indexed, so the workers cannot divide its "
            "samples beforehand. Pass world.shard a map-style dataset, a sampler with a length, or a stream that can "
            "be iterated again: class Stream(torch.utils.data.IterableDataset), with an __iter__ that yields the items."
        )
    return len(source)


def classes_of(labels: Labels, source: object) -> Tensor:
    """Labels of all samples, numbered in the order of their first appearance."""
    if isinstance(source, Sampler):
        raise TypeError(
            "stratify and labels need a dataset, since the samples of a sampler are not known beforehand. "
            "Write world.shard(dataset, stratify=labels)."
        )
    numbers: dict[Hashable, int] = {}
    values = labels.tolist() if isinstance(labels, Tensor) else labels
    try:
        codes = torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], device="cpu")
    except TypeError as error:
        raise TypeError(
            f"stratify and labels must have one label per sample, such as a list of numbers or of text, and cannot be "
            f"read here: {error}. Write world.shard(dataset, stratify=[label for _, label in dataset])."
        ) from None
    if len(codes) != length_of(source):
        raise ValueError(
            f"there are {len(codes)} labels for {length_of(source)} samples. "
            "Pass one label per sample, in the dataset's order."
        )
    return codes
