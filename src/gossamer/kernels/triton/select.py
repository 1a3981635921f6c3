"""Selection of the entries that travel, on a GPU: w is read a known number of times and never stored besides.

What is not float32, bfloat16 or float16 with float32 residuals goes to plain torch, and so do sizes that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.kernels.reference import select
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.triton.compaction import Chosen
from gossamer.kernels.triton.launch import serves
from gossamer.kernels.triton.momentum import accelerate
from gossamer.kernels.triton.radix import thresholds
from gossamer.kernels.triton.spans import Spans, spans
from gossamer.kernels.triton.status import expect_finite, fresh


def largest(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.select.largest."""
    lying = spans(len(x), sizes, counts, x.device) if _serves(x, residual) else None
    if lying is None:
        return select.largest(x, sizes, counts, residual)
    return _largest(x, lying, residual)


def largest_with_momentum(
    x: Tensor,
    sizes: Sequence[int],
    counts: Sequence[int],
    rate: float,
    momentum: Residual,
    residual: Residual,
    *,
    nesterov: bool = False,
    masked: bool = True,
) -> tuple[Tensor, Tensor]:
    """As reference.select.largest_with_momentum."""
    served = _serves(x, residual) and _serves(x, momentum)
    lying = spans(len(x), sizes, counts, x.device) if served else None
    if lying is None:
        return select.largest_with_momentum(
            x, sizes, counts, rate, momentum, residual, nesterov=nesterov, masked=masked
        )
    offered = accelerate(x, rate, momentum, nesterov=nesterov)
    return _largest(offered, lying, residual, momentum.after if masked else None)


def above(x: Tensor, threshold: float, room: int, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
    """As reference.select.above. The host reads at once how many entries there are and whether all is finite."""
    if room < 0 or not (_serves(x, residual) and len(x)):
        return select.above(x, threshold, room, residual)
    lying = spans(len(x), [len(x)], [0], x.device)
    assert lying is not None
    status, least = fresh(x.device), torch.full((1,), _magnitude(threshold), dtype=torch.int32, device=x.device)
    chosen = Chosen(lying, least, torch.zeros_like(least))
    sums = chosen.sums(x, None if residual is None else residual.before, status)
    wrong, found = torch.stack((status[0], sums[0, -1])).tolist()
    if wrong:
        expect_finite(status)
    if found > room:
        return largest(x, [len(x)], [room], residual)
    places, values = torch.empty(found, dtype=torch.int32, device=x.device), torch.zeros(room, device=x.device)
    chosen.take(x, residual, sums, places, values, status)
    return places, values


def _largest(
    x: Tensor, lying: Spans, residual: Residual | None, momentum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    places = torch.empty(lying.total, dtype=torch.int32, device=x.device)
    values = torch.empty(lying.total, device=x.device)
    if not len(x):
        return places, values
    status, before = fresh(x.device), None if residual is None else residual.before
    chosen = Chosen(lying, *thresholds(x, before, lying, status))
    chosen.take(x, residual, chosen.sums(x, before, status), places, values, status, momentum)
    expect_finite(status)
    return places, values


def _magnitude(threshold: float) -> int:
    """What `compaction` compares magnitudes with: all are above -1, and none is above that of NaN."""
    number = torch.tensor(threshold, dtype=torch.float32)
    if number.isnan():
        return 0x7FFFFFFF
    return -1 if number < 0 else int(number.abs().view(torch.int32))


def _serves(x: Tensor, residual: Residual | None) -> bool:
    owed = () if residual is None else (residual.before, residual.after)
    alike = all(each.shape == x.shape and each.dtype == torch.float32 for each in owed)
    return alike and x.dim() == 1 and serves(x, *owed)
