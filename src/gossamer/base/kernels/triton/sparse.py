"""Sums of entries at places, on a GPU: payload after payload, each with one addition that is rounded.

The places of a payload are all different, so that no two additions meet; those of different payloads follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import index_coding as truth
from gossamer.base.kernels.reference.finite import summing_terms
from gossamer.base.kernels.triton.finite import report_range
from gossamer.base.kernels.triton.launch import EXACT, TILE, serves, tiles
from gossamer.base.kernels.triton.places import decodable, decode
from gossamer.base.kernels.triton.status import found, fresh
from gossamer.base.kernels.triton.wanted import raw, widened


@triton.jit
def _add(places, values, out, count, divisor, tile: tl.constexpr):
    order = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = order < count
    to = out + tl.load(places + order, mask=inside, other=0)
    share = tl.div_rn(widened(tl.load(values + order, mask=inside, other=0)), divisor)
    tl.store(to, tl.load(to, mask=inside, other=0.0) + share, mask=inside)


def scatter(entries: Sequence[tuple[Tensor, Tensor]], out: Tensor, divisor: int = 1, *, onto: bool = False) -> None:
    """As reference.index_coding.scatter."""
    alike = all(place.shape == value.shape and serves(place, types=(torch.int32,)) for place, value in entries)
    if not (alike and _serves(out, [value for _, value in entries])):
        return truth.scatter(entries, out, divisor, onto=onto)
    if not onto:
        out.zero_()
    for places, values in entries:
        if len(values):
            _add[tiles(len(values))](places, raw(values), out, len(values), float(divisor), tile=TILE, **EXACT)
    return None


def sparse_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], out: Tensor, divisor: int = 1, *, onto: bool = False
) -> None:
    """As reference.index_coding.sparse_decode. The host reads once whether all payloads are in order."""
    n = len(out)
    served = _serves(out, [values for values, _ in payloads])
    if not (served and all(decodable(coded, len(values), n, len(values)) for values, coded in payloads)):
        return truth.sparse_decode(payloads, out, divisor, onto=onto)
    status = fresh(out.device)
    entries = []
    for values, coded in payloads:
        report_range(values, summing_terms(values.dtype, len(payloads)), status)
        entries.append((decode(coded, len(values), n, len(values), status), values))
    if found(status):
        return truth.sparse_decode(payloads, out, divisor, onto=onto)  # which reports the error
    return scatter(entries, out, divisor, onto=onto)


def _serves(out: Tensor, values: Sequence[Tensor]) -> bool:
    return out.dtype == torch.float32 and all(each.dim() == 1 for each in (out, *values)) and serves(out, *values)
