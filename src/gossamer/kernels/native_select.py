"""Selection and places by compiled loops; what they are not made for, and what is wrong, goes to plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.errors import MalformedError
from gossamer.kernels import places as truth
from gossamer.kernels import select
from gossamer.kernels.native import (
    MALFORMED,
    MISFIT,
    OVERFLOW,
    Count,
    Function,
    Pointer,
    address,
    addresses,
    counts_array,
    documented,
    serves,
)
from gossamer.kernels.residual import Residual
from gossamer.kernels.reuse import empty

SLACK = 80  # how many entries more than `room` may be written: kSlack in kernels-src/scan.hpp

_LARGEST = Function("gossamer_largest", *[Pointer] * 3, Count, *[Pointer] * 2, Count, *[Pointer] * 2)
_ABOVE = Function("gossamer_above", *[Pointer] * 3, Count, *[Pointer] * 2, Count, Count, *[Pointer] * 2)
_ENCODE = Function("gossamer_encode_places", Pointer, Count, Count, Count, Count, Pointer, Count)
_DECODE = Function("gossamer_decode_places", Pointer, Count, Count, Count, Count, Count, Pointer)
_SCATTER = Function("gossamer_scatter", *[Pointer] * 3, Count, Pointer, Count, Count, Count)

_low_bits = lru_cache(truth.low_bits)


@documented(select.largest)
def largest(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if len(sizes) != len(counts) or not _serves(x, residual):
        return select.largest(x, sizes, counts, residual)
    places, values = _entries(sum(counts))
    tensors = counts_array(sizes), counts_array(counts), len(sizes)
    if _LARGEST(*_buffers(x, residual), *tensors, address(places), address(values)) == MISFIT:
        return select.largest(x, sizes, counts, residual)
    return places, values


@documented(select.above)
def above(
    x: Tensor, sizes: Sequence[int], thresholds: Sequence[float], room: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor] | None:
    if len(sizes) != len(thresholds) or not _serves(x, residual):
        return select.above(x, sizes, thresholds, room, residual)
    limits = torch.tensor(list(thresholds), dtype=torch.float32)
    room = min(room, len(x))
    places, values = _entries(room + SLACK)
    tensors = counts_array(sizes), address(limits), len(sizes)
    found = _ABOVE(*_buffers(x, residual), *tensors, room, address(places), address(values))
    if found == MISFIT:
        return select.above(x, sizes, thresholds, room, residual)
    return None if found == OVERFLOW else (places[:found], values[:found])


@documented(truth.encode_places)
def encode_places(places: Tensor, n: int, room: int | None = None) -> Tensor:
    room = len(places) if room is None else room
    if not (serves(places) and places.dtype == torch.int32 and places.dim() == 1 and len(places) <= room):
        return truth.encode_places(places, n, room)
    coded = empty(truth.coded_bytes(room, n), torch.uint8)
    low = _low_bits(room, n)
    if _ENCODE(address(places), len(places), n, room, low, address(coded), len(coded)) == MALFORMED:
        raise ValueError(f"places to encode must ascend and be below {n}: sort them, each once")
    return coded


@documented(truth.decode_places)
def decode_places(coded: Tensor, count: int, n: int, room: int | None = None) -> Tensor:
    room = count if room is None else room
    fits = coded.dtype == torch.uint8 and coded.dim() == 1 and 0 <= count <= room
    if not (fits and serves(coded) and len(coded) == truth.coded_bytes(room, n)):
        return truth.decode_places(coded, count, n, room)
    places = empty(count, torch.int32)
    if _DECODE(address(coded), len(coded), count, n, room, _low_bits(room, n), address(places)) == MALFORMED:
        raise MalformedError(f"{count} ascending places below {n} were announced, and the code holds others")
    return places


@documented(truth.sparse_decode)
def sparse_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], out: Tensor, divisor: int = 1, *, onto: bool = False
) -> None:
    values, codes = [value for value, _ in payloads], [coded for _, coded in payloads]
    plain = all(tensor.dim() == 1 and tensor.dtype == torch.float32 for tensor in (out, *values))
    if not (plain and serves(out, *values, *codes)):
        return truth.sparse_decode(payloads, out, divisor, onto=onto)
    places = [decode_places(coded, len(value), len(out)) for value, coded in payloads]
    counts = counts_array([len(value) for value in values])
    _SCATTER(addresses(places), addresses(values), counts, len(values), address(out), len(out), divisor, onto)
    return None


def _serves(x: Tensor, residual: Residual | None) -> bool:
    """Whether these are float32 buffers of one size, and places in them fit in 32 bits."""
    buffers = (x,) if residual is None else (x, residual.before, residual.after)
    alike = all(tensor.dtype == torch.float32 and tensor.shape == x.shape for tensor in buffers)
    return alike and x.dim() == 1 and len(x) < 2**31 and serves(*buffers)


def _buffers(x: Tensor, residual: Residual | None) -> tuple[int | None, int | None, int | None, int]:
    before, after = (None, None) if residual is None else (residual.before, residual.after)
    return address(x), address(before), address(after), len(x)


def _entries(count: int) -> tuple[Tensor, Tensor]:
    return empty(max(count, 0), torch.int32), empty(max(count, 0), torch.float32)
