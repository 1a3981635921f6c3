"""Launching: which tensors Triton serves, and how its kernels are started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

# Products are rounded before they are added, as plain torch does it: ranks with and without a GPU agree bit for bit.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}

TILE = 1024  # entries that a program of an elementwise kernel serves

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def serves(*tensors: Tensor, types: Sequence[torch.dtype] = FLOATS) -> bool:
    """Whether kernels for these types may run over these tensors: contiguous, on one device, of fewer than 2^31
    entries each."""
    return all(
        tensor.dtype in types
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.device == tensors[0].device
        and tensor.device.type != "meta"
        and tensor.numel() < 2**31
        for tensor in tensors
    )


def warps_for(entries: int) -> int:
    """How many warps share a tile of float32 numbers."""
    return min(16, max(4, entries // 512))


def tiles(numel: int, tile: int = TILE) -> tuple[int]:
    """The grid of an elementwise kernel over so many entries."""
    return (triton.cdiv(numel, tile),)
