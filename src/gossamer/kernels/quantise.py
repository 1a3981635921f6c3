"""Every entry in a few bits. w = x + residual.before, or x; residual.after = w - what the code stands for.

Arithmetic is float32 (float64 for such input), one rounding for every operation written, none fused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.errors import MalformedError
from gossamer.kernels.noise import uniform
from gossamer.kernels.residual import Residual, wanted


def blocks(sizes: Sequence[int], block: int) -> int:
    """How many blocks tensors of these sizes have."""
    return sum(-(-size // block) for size in sizes)


def rows(span: Tensor, block: int) -> Tensor:
    """(n,) -> (ceil(n / block), block), the last row filled up with zeros."""
    short = -span.numel() % block
    return (pad(span, (0, short)) if short else span).view(-1, block)


def int8_encode(
    x: Tensor, sizes: Sequence[int], block: int, key: int | None = None, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(scales, codes): (blocks,) float32 and (n,) int8.

    s = max |w| / 127 over a block, q = w / s to the nearest integer (to the even one of two), or floor(w / s + u) with
    u = uniform(key), then between -127 and 127; 0 where s is. Stands for q s. Raises NotFinite.
    """
    w = wanted(x, residual)
    noise = None if key is None else uniform(key, len(w), w.device)
    codes = torch.empty(len(w), dtype=torch.int8, device=w.device)
    scales: list[Tensor] = []
    for place, span in _spans(w, sizes):
        cut = rows(span, block)
        scale = (cut.abs().amax(1, keepdim=True).float() / 127).view(-1, 1)
        ratio = cut / torch.where(scale == 0, torch.ones_like(scale), scale).to(w.dtype)
        whole = ratio.round() if noise is None else (ratio + rows(noise[place : place + len(span)], block)).floor()
        whole = torch.where(scale == 0, torch.zeros_like(whole), whole.clamp(-127, 127))
        codes[place : place + len(span)] = whole.view(-1)[: len(span)]
        if residual is not None:
            left = cut - whole * scale.to(w.dtype)
            residual.after[place : place + len(span)] = left.view(-1)[: len(span)]
        scales.append(scale.view(-1))
    return torch.cat(scales) if scales else w.new_empty(0, dtype=torch.float32), codes


def int8_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """Overwrite `out`: (n,) with the sum of q s over the payloads, in the order given, over `divisor`.

    Raises MalformedError before anything is written.
    """
    for scales, codes in payloads:
        _expect(scales, torch.float32, blocks(sizes, block))
        _expect(codes, torch.int8, sum(sizes))
    out.zero_()
    for scales, codes in payloads:
        for (place, span), scale in zip(
            _spans(codes, sizes), scales.split([-(-size // block) for size in sizes]), strict=True
        ):
            meant = rows(span, block).to(out.dtype) * scale.to(out.dtype)[:, None]
            out[place : place + len(span)].add_(meant.view(-1)[: len(span)])
    if divisor != 1:
        out.div_(divisor)


def _spans(flat: Tensor, sizes: Sequence[int]) -> list[tuple[int, Tensor]]:
    """(offset, elements) of each tensor."""
    found: list[tuple[int, Tensor]] = []
    place = 0
    for size in sizes:
        found.append((place, flat[place : place + size]))
        place += size
    return found


def _expect(tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    if tensor.dtype != dtype or tensor.shape != (numel,):
        raise MalformedError(f"a payload of {numel} {dtype} was due, and {tuple(tensor.shape)} {tensor.dtype} came")
