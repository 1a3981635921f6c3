"""Bin means: every entry as the bin that contains it, and the mean of each bin's entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import pairs
from gossamer.algorithms.compressors.quantize import Quantizer
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual
from gossamer.base.kernels.reference.bits import pack, unpack
from gossamer.base.kernels.reference.residual import wanted
from gossamer.base.kernels.reference.segments import average, expect_numbers, sendable
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import require

BITS = (2, 4)


@dataclass(frozen=True, repr=False)
class BinMeans(Quantizer):
    """Send the bin of each entry in a few bits, and for each tensor the means of its bins.

    C(x)_j = mean of the entries in bin b_j;  b_j = round((x_j - mean x) / s + B/2) within 0..B-1, B = 2^bits bins of
    width s = deviations / B times the standard deviation of x (divided by n - 1), or 1 where that is 0 or undefined
    law:    sum C(x) = sum x, and |x - C(x)|^2 = |x|^2 - |C(x)|^2, per tensor; tensors of zeros stay zero
    bytes:  (workers - 1) (ceil(N bits / 8) + 4 B), N per tensor
    source: Sarfi et al. 2025, arXiv:2508.15706 (SparseLoCo: 2 bits); Thérien et al. 2025, arXiv:2505.23725 (MuLoCo,
            "statistical"); both as their programs compute it

    Designed for the values of Chain(TopK(density=0.015625, chunk=4096), BinMeans()). With two bits, the bins are
    centered at -2, -1, 0 and 1 widths from the mean, and a width is 1.5 standard deviations. The largest entries of a
    Gaussian tensor use bins 1 and 3 only; SignMagnitude has as many bits and uses all of its four levels. Two values of
    one tensor share a bin, so both lose their sign.

    Args:
        bits: bits per entry, 2 or 4.
        deviations: range of all bins, in standard deviations of the tensor.
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.BinMeans(bits=4)
        BinMeans(bits=4)
    """

    bits: int = 2
    deviations: float = 6.0
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.bits in BITS,
            f"bits must be 2 or 4, so that codes fill bytes, got {self.bits}. Write BinMeans(bits=2).",
        )
        require(
            self.deviations > 0,
            f"deviations must be above 0, got {self.deviations}: it is the range of the bins in standard deviations. "
            f"Write BinMeans(bits={self.bits}, deviations=6.0).",
        )

    @property
    def bins(self) -> int:
        """Number of levels of each tensor."""
        return int(2**self.bits)

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        w = wanted(x.flat, residual)
        sizes = tuple(x.layout.sizes)
        codes, means = self._binned(w.double(), sizes)
        sendable_means = sendable(means)
        if residual is not None:
            torch.sub(w, self._meant(codes, sendable_means, sizes, w.dtype), out=residual.after)
        return sendable_means, pack(codes, sizes, 8 // self.bits, self.bins)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        sizes, sendable_means = tuple(layout.sizes), pairs(payloads)
        for means, _ in sendable_means:
            expect_numbers(means, (len(sizes) * self.bins,), len(payloads))
        codes = [unpack(packed, sizes, 8 // self.bits, self.bins) for _, packed in sendable_means]
        meant = (
            self._meant(each, means, sizes, out.dtype) for each, (means, _) in zip(codes, sendable_means, strict=True)
        )
        average(meant, out, divisor)

    def _binned(self, w: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return (codes, means) of w: (n,) float64: (n,) int64 and (tensors x bins,) float64."""
        owner, count = _owners(sizes, w.device), torch.tensor(sizes, dtype=w.dtype, device=w.device)
        nothing = w.new_zeros(len(sizes))
        center = nothing.index_add(0, owner, w) / count.clamp(min=1)
        off = w - center[owner]
        width = self.deviations / self.bins * (nothing.index_add(0, owner, off.square()) / (count - 1)).sqrt()
        width = torch.where(width.isfinite() & (width > 0), width, 1)
        codes = (off / width[owner] + self.bins / 2).round().clamp(0, self.bins - 1).long()
        slots, levels = owner * self.bins + codes, w.new_zeros(len(sizes) * self.bins)
        members = levels.index_add(0, slots, torch.ones_like(w))
        return codes, levels.index_add(0, slots, w) / members.clamp(min=1)

    def _meant(self, codes: Tensor, means: Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return means[_owners(sizes, codes.device) * self.bins + codes].to(dtype)


def _owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of the tensor of each entry: (n,) int64."""
    numbers = torch.arange(len(sizes), device=device)
    return numbers.repeat_interleave(torch.tensor(sizes, device=device), output_size=sum(sizes))
