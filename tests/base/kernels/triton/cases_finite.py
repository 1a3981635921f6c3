"""Range checks: calls that start every one of their kernels."""

from __future__ import annotations

import torch

from gossamer.base.kernels.triton import finite

CASES = [
    lambda: finite.within_range(torch.zeros(5000), 4),
    lambda: finite.within_range(torch.zeros(5000, dtype=torch.bfloat16), 4),
    lambda: finite.within_range(torch.zeros(5000, dtype=torch.float16), 4),
]
