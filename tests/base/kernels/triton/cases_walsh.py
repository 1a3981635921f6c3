"""Walsh-Hadamard transform: calls that start its kernel for short, usual and the longest blocks."""

from __future__ import annotations

import torch

from gossamer.base.kernels.triton import walsh

CASES = [
    lambda block=block, inverse=inverse: walsh.hadamard(
        torch.zeros(2 * block), [2 * block], block, torch.ones(block), torch.zeros(2 * block), inverse=inverse
    )
    for block, inverse in ((1, False), (2, True), (64, False), (1024, True), (2**14, False))
]
