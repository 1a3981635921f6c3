"""Code format: the codes of blocks, their number, and their decoded values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.base.kernels.reference.segments import blocks


@dataclass(frozen=True)
class CodeFormat:
    """A payload is `width` float32 numbers of each block, and a code of each entry."""

    meant: Any  # within a kernel: (code, first, second number of its block, most) -> float32
    dtype: torch.dtype
    bits: int
    width: int = 1
    most: int = 0  # the largest code; 0 where all are codes
    hole: int = -1  # a code below it that no encoder writes

    @property
    def named(self) -> dict[str, int]:
        """The arguments of every kernel of codes."""
        return {"bits": self.bits, "width": self.width, "most": self.most}

    def numel(self, sizes: Sequence[int], block: int) -> tuple[int, int]:
        """How many numbers of blocks, and how many bytes of codes, of which every tensor begins one."""
        return self.width * blocks(sizes, block), blocks([size * self.bits for size in sizes], 8)

    def room(self, sizes: Sequence[int], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
        scales, codes = self.numel(sizes, block)
        return torch.empty(scales, device=device), torch.empty(codes, dtype=self.dtype, device=device)
