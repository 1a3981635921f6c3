"""Selection of the entries to send, on a GPU: x is read once, and once more if there is a residual.

- `largest` reads x and residual.before once to gather candidates, which are few, in room that depends on sizes and
  counts; the k largest are selected from these. It reads both once more to write residual.after: only after all values
  are known to be finite, as a residual in place could not be restored.
- `above` does the same. If it finds more than it has room for it starts again as `largest`.
- `largest_with_momentum` reads x and momentum.before once to write momentum.after, and continues with it in place of x;
  with Nesterov's it writes that x.

In addition, a sample of at most 16384 entries of each tensor is read. If its bound was a bad one, or more entries are
equal to the k-th than there is room for, a tensor is read five times more; only twice more if these are zeros.

Other dtypes than float32, bfloat16 or float16 with float32 residuals use plain torch, and so do unsupported sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference import select
from gossamer.base.kernels.reference.residual import Residual, both
from gossamer.base.kernels.triton.candidates import gathered
from gossamer.base.kernels.triton.compaction import Chosen
from gossamer.base.kernels.triton.launch import serves
from gossamer.base.kernels.triton.momentum import accelerate
from gossamer.base.kernels.triton.radix import thresholds
from gossamer.base.kernels.triton.remainder import leave
from gossamer.base.kernels.triton.sampling import bounds
from gossamer.base.kernels.triton.spans import Spans, span, spans
from gossamer.base.kernels.triton.status import expect_finite, fresh
from gossamer.base.kernels.triton.wanted import raw, tensors_of

NAN = 0x7FFFFFFF  # a magnitude that is above those of all numbers


def largest(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.select.largest."""
    lying = spans(len(x), sizes, counts, x.device) if _serves(x, residual) else None
    if lying is None:
        return select.largest(x, sizes, counts, residual)
    return _largest(raw(x), lying, residual)


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
    lying, status, least = span(len(x), room, x.device), fresh(x.device), _magnitude(threshold)
    limit, bound = (torch.full_like(status, each) for each in (least, min(least + 1, NAN)))
    candidates = gathered(raw(x), tensors_of(residual)[0], lying, bound, status)
    wrong, found = torch.cat((status, candidates.found)).tolist()
    if wrong:
        expect_finite(status)
    if found > room:
        return largest(x, [len(x)], [room], residual)
    places, values = torch.empty(found, dtype=torch.int32, device=x.device), torch.zeros(room, device=x.device)
    chosen = Chosen(candidates, limit, torch.zeros_like(limit))
    _write(chosen, residual, places, values, status)
    return places, values


def _largest(
    x: Tensor, lying: Spans, residual: Residual | None, momentum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    places = torch.empty(lying.total, dtype=torch.int32, device=x.device)
    values = torch.empty(lying.total, device=x.device)
    if not len(x):
        return places, values
    status, (before, _) = fresh(x.device), tensors_of(residual)
    candidates = gathered(x, before, lying, bounds(x, before, lying), status)
    _write(Chosen(candidates, *thresholds(candidates)), residual, places, values, status, momentum)
    expect_finite(status)
    return places, values


def _write(
    chosen: Chosen,
    residual: Residual | None,
    places: Tensor,
    values: Tensor,
    status: Tensor,
    momentum: Tensor | None = None,
) -> None:
    ends = chosen.take(places, values, status)
    if residual is not None:
        leave(residual, chosen, ends, status, momentum)


def _magnitude(threshold: float) -> int:
    """Return the value that `compaction` compares magnitudes with: all are above -1, and none is above that of NaN."""
    number = torch.tensor(threshold, dtype=torch.float32)
    if number.isnan():
        return NAN
    return -1 if number < 0 else int(number.abs().view(torch.int32))


def _serves(x: Tensor, residual: Residual | None) -> bool:
    buffers = both(residual)
    alike = all(each.shape == x.shape and each.dtype == torch.float32 for each in buffers)
    return alike and x.dim() == 1 and serves(x, *buffers)
