"""Walsh-Hadamard transform by compiled loops; unsupported inputs use plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.blocks import are, tiled, tiling
from gossamer.base.kernels.library import OVERFLOW, Count, Function, Pointer, address, kernel
from gossamer.base.kernels.reference import hadamard as plain
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK

_HADAMARD = Function("gossamer_hadamard", *[Pointer] * 2, *[Count] * 2, Pointer, Count, Pointer)


@kernel(plain.hadamard)
def hadamard(x: Tensor, sizes: Sequence[int], block: int, signs: Tensor, out: Tensor, *, inverse: bool = False) -> bool:
    if not (block <= LARGEST_BLOCK and are([signs], torch.float32, block) and tiled(sizes, x, out)):
        return plain.hadamard(x, sizes, block, signs, out, inverse=inverse)
    return _HADAMARD(address(x), *tiling(sizes), block, address(signs), inverse, address(out)) != OVERFLOW
