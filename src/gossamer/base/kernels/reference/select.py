"""Selection of the entries that travel. Places are int32, ascending, within the whole buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.base.kernels.reference.residual import Residual, wanted


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
    """As `largest`, with w = u' + residual.before, u' = x + rate u; Nesterov's w = x + rate u' + residual.before.

    u is momentum.before; momentum.after = u', if `masked` with zeros where an entry was taken. Every operation is
    rounded.
    """
    torch.add(x, momentum.before * rate, out=momentum.after)
    offered = x + momentum.after * rate if nesterov else momentum.after
    places, values = largest(offered, sizes, counts, residual)
    if masked:
        momentum.after[places.long()] = 0
    return places, values


def above(x: Tensor, threshold: float, room: int, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
    """(places, values) of all entries with |w| > threshold, or of the `room` largest where more are.

    As `largest`, with one difference: (room,) values, zeros behind those of the places. The threshold is compared in
    float32 for float32 input.
    """
    w = wanted(x, residual)
    if w.is_meta:
        return w.new_empty(room, dtype=torch.int32), w.new_empty(room)
    taken = w.abs() > torch.tensor(threshold, dtype=w.dtype, device=w.device)
    places, values = largest(x, [len(x)], [room], residual) if int(taken.sum()) > room else _take(w, taken, residual)
    return places, pad(values, (0, room - len(values)))


def _take(w: Tensor, taken: Tensor, residual: Residual | None) -> tuple[Tensor, Tensor]:
    places = taken.nonzero().view(-1)
    values = w[places]
    if residual is not None:
        residual.after.copy_(w)[places] = 0
    return places.int(), values
