"""Selection and places by compiled loops; unsupported and invalid inputs use plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.base.kernels.blocks import buffers
from gossamer.base.kernels.buffer_pool import empty
from gossamer.base.kernels.checks import summable
from gossamer.base.kernels.library import (
    MALFORMED,
    MISFIT,
    Count,
    Function,
    Pointer,
    address,
    addresses,
    counts_array,
    kernel,
    serves,
)
from gossamer.base.kernels.reference import index_coding as truth
from gossamer.base.kernels.reference import select
from gossamer.base.kernels.reference.residual import Residual, both
from gossamer.errors import MalformedError

Rate = ctypes.c_float

_LARGEST = Function("gossamer_largest", *[Pointer] * 3, Count, *[Pointer] * 2, Count, *[Pointer] * 2)
_LARGEST_WITH_MOMENTUM = Function(
    "gossamer_largest_with_momentum",
    *[*[Pointer] * 3, Rate, Count, Count],
    *[*[Pointer] * 2, Count, *[Pointer] * 2, Count, *[Pointer] * 2],
)
_ABOVE = Function("gossamer_above", *[Pointer] * 3, Count, Rate, Count, *[Pointer] * 2)
_ENCODE = Function("gossamer_encode_places", Pointer, Count, Count, Count, Count, Pointer, Count)
_DECODE = Function("gossamer_decode_places", Pointer, Count, Count, Count, Count, Count, Pointer)
_SCATTER = Function("gossamer_scatter", *[Pointer] * 3, Count, Pointer, Count, Count, Count)

_low_bits = lru_cache(truth.low_bits)
_coded_bytes = lru_cache(truth.coded_bytes)


@kernel(select.largest)
def largest(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    if len(sizes) != len(counts) or not _serves(x, *both(residual)):
        return select.largest(x, sizes, counts, residual)
    places, values = _entries(sum(counts))
    if _LARGEST(*buffers(x, residual), len(x), *_tensors(sizes, counts), address(places), address(values)) == MISFIT:
        return select.largest(x, sizes, counts, residual)
    return places, values


@kernel(select.largest_with_momentum)
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
    if len(sizes) == len(counts) and _serves(x, *both(momentum), *both(residual)):
        places, values = _entries(sum(counts))
        accelerated = *map(address, (x, *both(momentum))), rate, nesterov, masked
        lying = *accelerated, *map(address, both(residual)), len(x)
        if _LARGEST_WITH_MOMENTUM(*lying, *_tensors(sizes, counts), address(places), address(values)) != MISFIT:
            return places, values
    return select.largest_with_momentum(x, sizes, counts, rate, momentum, residual, nesterov=nesterov, masked=masked)


@kernel(select.above)
def above(x: Tensor, threshold: float, room: int, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
    if room < 0 or not _serves(x, *both(residual)):
        return select.above(x, threshold, room, residual)
    places, values = _entries(room)
    found = _ABOVE(*buffers(x, residual), len(x), threshold, room, address(places), address(values))
    return places[:found], values


@kernel(truth.encode_places)
def encode_places(places: Tensor, n: int, room: int | None = None) -> Tensor:
    room = len(places) if room is None else room
    if not (serves(places) and places.dtype == torch.int32 and places.dim() == 1 and len(places) <= room):
        return truth.encode_places(places, n, room)
    coded = empty(_coded_bytes(room, n), torch.uint8)
    low = _low_bits(room, n)
    if _ENCODE(address(places), len(places), n, room, low, address(coded), len(coded)) == MALFORMED:
        raise ValueError(f"places to encode must ascend and be below {n}: sort them, each once")
    return coded


@kernel(truth.decode_places)
def decode_places(coded: Tensor, count: int, n: int, room: int | None = None) -> Tensor:
    room = count if room is None else room
    fits = coded.dtype == torch.uint8 and coded.dim() == 1 and 0 <= count <= room
    if not (fits and serves(coded) and len(coded) == _coded_bytes(room, n)):
        return truth.decode_places(coded, count, n, room)
    places = empty(count, torch.int32)
    if _DECODE(address(coded), len(coded), count, n, room, _low_bits(room, n), address(places)) == MALFORMED:
        raise MalformedError(f"{count} ascending places below {n} were announced, and the code holds others")
    return places


@kernel(truth.sparse_decode)
def sparse_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], out: Tensor, divisor: int = 1, *, onto: bool = False
) -> None:
    plain = _scatters([values for values, _ in payloads], [coded for _, coded in payloads], out)
    if not (plain and all(summable(values, len(payloads)) for values, _ in payloads)):
        return truth.sparse_decode(payloads, out, divisor, onto=onto)
    return scatter([(decode_places(coded, len(v), len(out)), v) for v, coded in payloads], out, divisor, onto=onto)


@kernel(truth.scatter)
def scatter(entries: Sequence[tuple[Tensor, Tensor]], out: Tensor, divisor: int = 1, *, onto: bool = False) -> None:
    places, values = [place for place, _ in entries], [value for _, value in entries]
    alike = all(len(place) == len(value) and place.dtype == torch.int32 for place, value in entries)
    if not (alike and _scatters(values, places, out)):
        return truth.scatter(entries, out, divisor, onto=onto)
    counts = counts_array([len(value) for value in values])
    _SCATTER(addresses(places), addresses(values), counts, len(values), address(out), len(out), divisor, onto)
    return None


def _scatters(values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor) -> bool:
    """Whether these are float32 values for a float32 buffer that compiled loops can access."""
    plain = all(tensor.dim() == 1 and tensor.dtype == torch.float32 for tensor in (out, *values))
    return plain and serves(out, *values, *places)


def _serves(x: Tensor, *others: Tensor) -> bool:
    """Whether these are float32 buffers of one size, and places in them fit in 32 bits."""
    alike = all(tensor.dtype == torch.float32 and tensor.shape == x.shape for tensor in (x, *others))
    return alike and x.dim() == 1 and len(x) < 2**31 and serves(x, *others)


def _tensors(
    sizes: Sequence[int], counts: Sequence[int]
) -> tuple[ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64], int]:
    return _array(tuple(sizes)), _array(tuple(counts)), len(sizes)


# Layouts are the same at every step; hashing their sizes is cheaper than walking over them.
@lru_cache(maxsize=1024)
def _array(counts: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return counts_array(counts)


def _entries(count: int) -> tuple[Tensor, Tensor]:
    return empty(max(count, 0), torch.int32), empty(max(count, 0), torch.float32)
