"""Radial-directional mean: the norms and the directions of pseudo-gradients are averaged separately, per tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.layout import accumulation_dtype


def split_lengths(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Divide each tensor of `flat`, (n,), by its norm, and return the norms: (tensors,).

    A tensor of zeros is unchanged.
    """
    lengths = _norms(flat, sizes)
    _scale(flat, sizes, 1 / lengths.where(lengths > 0, torch.ones_like(lengths)))
    return lengths


def restore_lengths(directions: Tensor, sizes: Sequence[int], lengths: Tensor) -> None:
    """Scale each tensor of `directions`, (n,), to the given norm; a mean without a direction stays zero."""
    norms = _norms(directions, sizes)
    _scale(directions, sizes, (lengths / norms).where(norms > 0, torch.zeros_like(norms)))


def _norms(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    dtype = accumulation_dtype(flat.dtype)
    norms = [torch.linalg.vector_norm(part, dtype=dtype) for part in flat.split(list(sizes))]
    return torch.stack(norms) if norms else flat.new_empty(0, dtype=dtype)


def _scale(flat: Tensor, sizes: Sequence[int], factors: Tensor) -> None:
    for part, factor in zip(flat.split(list(sizes)), factors.to(flat.dtype), strict=True):
        part.mul_(factor)
