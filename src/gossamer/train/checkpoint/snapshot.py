"""Snapshot: copies a tree's tensors into host memory, which is reused for the next copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.train.checkpoint.pytree import flatten


@dataclass(frozen=True)
class Flat:
    """A flattened tree: JSON, and tensors by name."""

    text: str
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, tree: Any) -> Flat:
        return tree if isinstance(tree, Flat) else cls(*flatten(tree))


class SnapshotBuffers:
    """Host memory for one tree; pinned for tensors of a CUDA device, for faster copies.

    The memory of a tensor with the same name, shape and dtype is reused; the rest is freed.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tree: Any) -> Flat:
        """Copy the tree. The next call overwrites the copy."""
        flat = Flat.of(tree)
        devices: set[torch.device] = set()
        copies: dict[str, Tensor] = {}
        for name, tensor in flat.tensors.items():
            copies[name] = self._buffer(name, tensor)
            copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = copies
        return Flat(flat.text, copies)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is not None and known.shape == like.shape and known.dtype == like.dtype:
            return known
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
