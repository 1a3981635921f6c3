"""Coded places and sums of entries: calls that start every one of their kernels."""

from __future__ import annotations

import torch

from gossamer.base.kernels.triton import places, sparse


def code(count: int, n: int) -> torch.Tensor:
    return torch.zeros(places.coded_bytes(count, n), dtype=torch.uint8)


CASES = [
    *[
        lambda count=count, n=n: places.encode_places(torch.zeros(count, dtype=torch.int32), n)
        for count, n in ((100, 10_000), (1, 10_000), (100, 150), (5, 2**31 - 1), (50, 101))
    ],
    *[
        lambda count=count, n=n: places.decode_places(code(count, n), count, n)
        for count, n in ((100, 10_000), (1, 10_000), (100, 150), (5, 2**31 - 1), (50, 101))
    ],
    *[
        lambda dtype=dtype: sparse.sparse_decode([(torch.zeros(9, dtype=dtype), code(9, 500))] * 2, torch.zeros(500))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ],
]
