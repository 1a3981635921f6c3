"""Every entry travels, in a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compressors.base import Codec, wide
from gossamer.errors import require
from gossamer.layout import Layout, Packed
from gossamer.words import At, Payload


@dataclass(frozen=True, repr=False)
class Int8(Codec):
    """Send each entry in eight bits, with one float32 scale per block of each tensor.

    C(x)_j = s round(x_j / s), s = max |x| / 127 over the block of `block` entries that j is in
    law:    |x_j - C(x)_j| <= s / 2; zeros stay zero
    bytes:  (workers - 1) (N + 4 ceil(N / block)), N per tensor
    source: Dettmers 2016, ICLR (8-bit gradients); Dettmers et al. 2022, ICLR (blocks)
    """

    block: int = 256
    feedback: bool = True

    def __post_init__(self) -> None:
        require(self.block >= 1, f"block counts the entries that share a scale, at least 1, not {self.block}")

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def encode(self, x: Packed, at: At) -> Payload:
        scales: list[Tensor] = []
        codes = torch.empty(x.layout.numel, dtype=torch.int8, device=x.flat.device)
        for slot in x.layout:
            rows = _rows(slot.span(x.flat), self.block).to(wide(x.flat.dtype))
            scale = rows.abs().amax(1, keepdim=True).float().div_(127)
            divisor = torch.where(scale == 0, torch.ones_like(scale), scale)  # a block of zeros stays zeros
            slot.span(codes).copy_((rows / divisor).round_().clamp_(-127, 127).view(-1)[: slot.numel])
            scales.append(scale.view(-1))
        return torch.cat(scales), codes

    def accumulate(self, payloads: Sequence[Payload], layout: Layout, out: Tensor) -> None:
        blocks = [-(-slot.numel // self.block) for slot in layout]
        for scales, codes in payloads:
            for slot, scale in zip(layout, scales.split(blocks), strict=True):
                rows = _rows(slot.span(codes), self.block).to(out.dtype)
                slot.span(out).add_(rows.mul_(scale.to(out.dtype)[:, None]).view(-1)[: slot.numel])


def _rows(span: Tensor, block: int) -> Tensor:
    """(n,) -> (ceil(n / block), block), the last row filled up with zeros."""
    short = -span.numel() % block
    return (pad(span, (0, short)) if short else span).view(-1, block)
