"""What kernels of codes are compiled for: every type of numbers, with and without a residual, in blocks of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.base.kernels.reference.residual import Residual

N = 20_000
X, OWED, OUT = torch.zeros(N), torch.zeros(N), torch.zeros(N)
EVEN, ODD = [N], [N - 1, 1]


def encodings(encode: Callable[[Tensor, list[int], int, Residual | None], Any]) -> Iterator[Callable[[], Any]]:
    owed = Residual(OWED, OWED)
    for x, sizes, block, residual in (
        (X, EVEN, 1024, owed),
        (X.half(), ODD, 8, owed),
        (X.bfloat16(), ODD, 2**14, None),
    ):
        yield lambda x=x, sizes=sizes, block=block, residual=residual: encode(x, sizes, block, residual)


def decodings(
    decode: Callable[..., Any], bits: int, width: int = 1, dtype: torch.dtype = torch.uint8
) -> Iterator[Callable[[], Any]]:
    for sizes, block in ((EVEN, 1024), (ODD, 8)):
        scales = sum(-(-size // block) for size in sizes) * width
        codes = sum(-(-size * bits // 8) for size in sizes)
        heard = [(torch.zeros(scales), torch.zeros(codes, dtype=dtype)) for _ in range(3)]
        yield lambda sizes=sizes, block=block, heard=heard: decode(heard, sizes, block, OUT, 3)
