"""Sources: what a sampler deals out, its length and its labels."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

Labels = Iterable[Hashable] | Tensor


def length_of(source: Any) -> int:
    if isinstance(source, DataLoader) or hasattr(source, "collate_fn"):  # session.track returns loaders of its own
        raise TypeError(
            "world.shard takes a dataset, a stream or a sampler, and this is a DataLoader, which yields batches. Write "
            "DataLoader(loader.dataset, batch_size=..., sampler=world.shard(loader.dataset)), or for a loader over a "
            "stream DataLoader(world.shard(stream), batch_size=...)."
        )
    scalar = isinstance(source, Tensor) and not source.dim()
    if isinstance(source, IterableDataset) or scalar or not hasattr(source, "__len__"):
        raise TypeError(
            f"{type(source).__name__} has no length or cannot be indexed, so the workers cannot divide its "
            "samples beforehand. Give world.shard a map-style dataset, a sampler with a length, or a stream that "
            "can be begun again: class Stream(torch.utils.data.IterableDataset), whose __iter__ yields the items."
        )
    return len(source)


def classes_of(labels: Labels, source: object) -> Tensor:
    """Labels numbered in the order of their first appearance, one a sample."""
    if isinstance(source, Sampler):
        raise TypeError(
            "stratify and labels need a dataset: which samples a sampler will yield is not known beforehand. "
            "Write world.shard(dataset, stratify=labels)."
        )
    numbers: dict[Hashable, int] = {}
    values = labels.tolist() if isinstance(labels, Tensor) else labels
    try:
        codes = torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], device="cpu")
    except TypeError as error:
        raise TypeError(
            f"stratify and labels are one label a sample, such as a list of numbers or of text, and cannot be read "
            f"here: {error}. Write world.shard(dataset, stratify=[label for _, label in dataset])."
        ) from None
    if len(codes) != length_of(source):
        raise ValueError(
            f"there are {len(codes)} labels for {length_of(source)} samples, so they cannot be matched. "
            "Give one label a sample, in the dataset's order."
        )
    return codes
