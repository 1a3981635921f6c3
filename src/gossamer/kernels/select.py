"""Which entries travel. Places are int32, ascending, within the whole buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.kernels.residual import Residual, wanted


def largest(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(places, values) of the counts[i] entries of largest magnitude of each tensor i; among equals the first ones.

    w = x + residual.before; residual.after = w, and zero where an entry was taken. values: at least float32.
    Raises NotFinite.
    """
    w = wanted(x, residual)
    if w.is_meta:
        total = sum(counts)
        return w.new_empty(total, dtype=torch.int32), w.new_empty(total)
    taken = torch.zeros(len(w), dtype=torch.bool, device=w.device)
    for span, mark, count in zip(w.split(list(sizes)), taken.split(list(sizes)), counts, strict=True):
        if count:
            magnitude = span.abs()
            least = magnitude.topk(count, sorted=False).values.amin()
            torch.gt(magnitude, least, out=mark)
            equal = (magnitude == least).nonzero().view(-1)
            mark[equal[: count - int(mark.sum())]] = True
    return _take(w, taken, residual)


def above(
    x: Tensor, sizes: Sequence[int], thresholds: Sequence[float], room: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor] | None:
    """(places, values) of all entries with |w| > thresholds[i] in each tensor i; None where more than `room` are.

    As `largest`; after None residual.after holds nothing useful, unless it is residual.before, which is unchanged.
    Thresholds are compared in float32 for float32 input.
    """
    w = wanted(x, residual)
    limits = torch.tensor(list(thresholds), dtype=w.dtype, device=w.device)
    repeats = torch.tensor(list(sizes), dtype=torch.int64, device=w.device)
    limits = limits.repeat_interleave(repeats, output_size=len(w))
    taken = w.abs() > limits
    return None if int(taken.sum()) > room else _take(w, taken, residual)


def _take(w: Tensor, taken: Tensor, residual: Residual | None) -> tuple[Tensor, Tensor]:
    places = taken.nonzero().view(-1)
    values = w[places]
    if residual is not None:
        residual.after.copy_(w)[places] = 0
    return places.int(), values
