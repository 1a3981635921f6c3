"""Snapshot: copies a tree's tensors into host memory that is used again for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.train.checkpoint.pytree import flatten


@dataclass(frozen=True)
class Flat:
    """A tree as `flatten` has it: JSON, and tensors by name."""

    text: str
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, tree: Any) -> Flat:
        return tree if isinstance(tree, Flat) else cls(*flatten(tree))


class SnapshotBuffers:
    """Host memory for one tree at a time, of its size; pinned for tensors of a CUDA device, which then copies faster.

    A tensor of the same name, shape and dtype is copied to where the last one was; the rest is freed.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tree: Any) -> Flat:
        """The tree as it is now. It changes with the next copy."""
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
