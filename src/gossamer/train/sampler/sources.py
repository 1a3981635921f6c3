"""Sources: length and labels of the data that a sampler divides."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, TensorDataset

from gossamer.base.layout import bytes_of

Labels = Iterable[Hashable] | Tensor
MOST_SAMPLED = 2**28  # entries of a sampler, which are drawn as one list for each epoch
FIRST_ROWS = 16  # of a TensorDataset's tensors, which are compared between ranks
MOST_ENTRIES = 2**20  # of these rows: a row may be a volume or a video


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
    if isinstance(source, Sampler) and (parts := getattr(source, "num_replicas", 1)) != 1:
        raise ValueError(
            f"this {type(source).__name__} yields one of {parts} parts of the data, and world.shard would divide it "
            "again, so most samples would never be used. Pass the dataset itself: world.shard(dataset), or "
            "world.shard(dataset, shuffle=False)."
        )
    length = len(source)
    if isinstance(source, Sampler) and length > MOST_SAMPLED:
        raise ValueError(
            f"this {type(source).__name__} yields {length:,} entries in an epoch, and the workers divide an epoch as "
            "one list, which would not fit into memory. Pass a shorter sampler and iterate over the loader again: "
            "RandomSampler(dataset, replacement=True, num_samples=100_000)."
        )
    return length


def digest_of(source: Any) -> str:
    """A text that is equal on ranks with the same data: its length, with a hash of the indices of a Subset or of a
    dataset of PyTorch Geometric, and of the first rows of a TensorDataset."""
    digest, length = hashlib.blake2b(digest_size=8), length_of(source)
    while isinstance(source, Subset):
        _add_indices(digest, source.indices)
        source = source.dataset
    _add_indices(digest, getattr(source, "_indices", None))  # of PyTorch Geometric, whose datasets shuffle themselves
    if type(source) is TensorDataset:
        for tensor in source.tensors:
            if tensor.layout is torch.strided and not tensor.is_quantized:
                digest.update(_bytes(tensor[:FIRST_ROWS].reshape(-1)[:MOST_ENTRIES]))
    return f"{length} samples ({digest.hexdigest()})"


def _add_indices(digest: hashlib.blake2b, indices: object) -> None:
    if isinstance(indices, (Sequence, np.ndarray, Tensor)):
        with suppress(TypeError, ValueError):  # keys of another kind, such as texts
            digest.update(np.asarray(indices, dtype=np.int64).tobytes())


def _bytes(entries: Tensor) -> bytes:
    """entries: (n,), of any dtype and device."""
    plain = entries.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return repr(plain.dtype).encode() + bytes_of(plain).numpy().tobytes()


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
        codes = torch.tensor([numbers.setdefault(_plain(value), len(numbers)) for value in values], device="cpu")
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


def _plain(label: Hashable) -> Hashable:
    """The value of a tensor with one entry, such as the labels of a TensorDataset; a tensor is hashed by its identity.
    Raises TypeError for other tensors."""
    if not isinstance(label, Tensor):
        return label
    if label.numel() != 1:
        raise TypeError(f"a label is a tensor of shape {tuple(label.shape)}")
    return label.item()
