"""Index coding on a GPU: ascending places in few bits, the same bytes as plain torch's.

Writing, each place sets its own bits, and `or` has no order. Reading, each block of bytes counts its bits, a running
sum over blocks gives their indices, and each block writes its own; then every place gets its low
bits and is compared with the next one.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import index_coding as truth
from gossamer.base.kernels.triton.launch import EXACT, TILE, serves, tiles
from gossamer.base.kernels.triton.status import MALFORMED, found, fresh, report
from gossamer.errors import MalformedError

BYTES = 2048  # of a code, which a program reads

coded_bytes = lru_cache(truth.coded_bytes)
_low_bits = lru_cache(truth.low_bits)


@triton.jit
def _write(places, words, count, n, low, highs_at, status, bitmap: tl.constexpr, tile: tl.constexpr):
    order = tl.program_id(0) * tile + tl.arange(0, tile)
    place = tl.load(places + order, mask=order < count, other=-1).to(tl.int64)
    earlier = tl.load(places + order - 1, mask=(order > 0) & (order < count), other=-1)
    inside = (place > earlier) & (place < n)
    report(status, (order < count) & ~inside, MALFORMED)
    if bitmap:
        at = place
    else:
        at = highs_at + (place >> low) + order
        least, start = place & ((1 << low) - 1), order.to(tl.int64) * low
        shifted = least << (start % 32)
        here, beyond = (shifted & 0xFFFFFFFF).to(tl.uint32), (shifted >> 32).to(tl.uint32)
        word = words + start // 32
        tl.atomic_or(word, here.to(tl.int32, bitcast=True), mask=inside & (here != 0), sem="relaxed")
        tl.atomic_or(word + 1, beyond.to(tl.int32, bitcast=True), mask=inside & (beyond != 0), sem="relaxed")
    one = (tl.full((tile,), 1, tl.uint32) << (at % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(words + at // 32, one, mask=inside, sem="relaxed")


def encode_places(places: Tensor, n: int, room: int | None = None) -> Tensor:
    """As reference.index_coding.encode_places. Raises ValueError for places that no decoder would read."""
    room = len(places) if room is None else room
    if not (places.dim() == 1 and serves(places, types=(torch.int32,)) and len(places) <= room and n < 2**31):
        return truth.encode_places(places, n, room)
    low, numel = _low_bits(room, n), coded_bytes(room, n)
    words = torch.zeros(-(-numel // 4), dtype=torch.int32, device=places.device)
    if len(places):
        status, bitmap, low = fresh(places.device), low == truth.BITMAP, max(low, 0)
        _write[tiles(len(places))](
            places, words, len(places), n, low, _lows(room, low) * 8, status,
            bitmap=bitmap, tile=TILE, **EXACT,
        )  # fmt: skip
        if found(status):
            raise ValueError(f"places to encode must ascend and be below {n}: sort them, each once")
    return words.view(torch.uint8)[:numel]


@triton.jit
def _ones(byte):
    """How many bits of a byte are set."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0xF


@triton.jit
def _count(stream, numel, numbers, tile: tl.constexpr):
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    byte = tl.load(stream + at, mask=at < numel, other=0).to(tl.int32)
    tl.store(numbers + tl.program_id(0) + 1, tl.sum(_ones(byte), 0))


@triton.jit
def _rank(stream, numel, sums, blocks, highs, count, status, unary: tl.constexpr, tile: tl.constexpr):
    """The i-th set bit, less i where the code is unary, to highs[i]."""
    number = tl.program_id(0)
    at = number * tile + tl.arange(0, tile)
    byte = tl.load(stream + at, mask=at < numel, other=0).to(tl.int32)
    ones = _ones(byte)
    order = tl.load(sums + number) + tl.cumsum(ones, 0) - ones
    report(status, tl.load(sums + blocks + tl.arange(0, 1)) != count, MALFORMED)
    for digit in tl.static_range(8):
        is_set = (byte >> digit) & 1
        high = at.to(tl.int64) * 8 + digit
        if unary:
            high -= order
        tl.store(highs + order, high.to(tl.int32), mask=(is_set > 0) & (order < count))
        order += is_set


@triton.jit
def _whole(highs, lows, lows_numel, order, count, low):
    """(tile,) int64: places with the low bits, which begin anywhere in a byte and reach over up to five."""
    start = order.to(tl.int64) * low
    inside, byte = order < count, start // 8
    least = tl.zeros_like(start)
    for k in tl.static_range(5):
        part = tl.load(lows + byte + k, mask=inside & (byte + k < lows_numel), other=0)
        least |= part.to(tl.int64) << (8 * k)
    high = tl.load(highs + order, mask=inside, other=0).to(tl.int64)
    return (high << low) | ((least >> (start % 8)) & ((1 << low) - 1))


@triton.jit
def _finish(highs, lows, lows_numel, places, count, n, low, status, tile: tl.constexpr):
    order = tl.program_id(0) * tile + tl.arange(0, tile)
    place = _whole(highs, lows, lows_numel, order, count, low)
    following = _whole(highs, lows, lows_numel, order + 1, count, low)
    report(status, (order < count) & ((place >= n) | ((order + 1 < count) & (following <= place))), MALFORMED)
    tl.store(places + order, place.to(tl.int32), mask=order < count)


def decode_places(coded: Tensor, count: int, n: int, room: int | None = None) -> Tensor:
    """As reference.index_coding.decode_places."""
    room = count if room is None else room
    if not decodable(coded, count, n, room):
        return truth.decode_places(coded, count, n, room)
    status = fresh(coded.device)
    places = decode(coded, count, n, room, status)
    if found(status):
        raise MalformedError(f"{count} ascending places below {n} were announced, and the code holds others")
    return places


def decodable(coded: Tensor, count: int, n: int, room: int) -> bool:
    """Whether this has the length of such a code, in memory that kernels can read."""
    fits = 0 <= count <= room and n < 2**31 and coded.dim() == 1 and len(coded) == coded_bytes(room, n)
    return fits and serves(coded, types=(torch.uint8,))


def decode(coded: Tensor, count: int, n: int, room: int, status: Tensor) -> Tensor:
    """The places of a code, (count,) int32, of no meaning where something is reported."""
    highs = torch.empty(count, dtype=torch.int32, device=coded.device)
    low = max(_low_bits(room, n), 0)
    lows, stream = coded[: _lows(room, low)], coded[_lows(room, low) :]
    if len(stream):
        _unary(stream, highs, status, unary=_low_bits(room, n) != truth.BITMAP)
    places = torch.empty_like(highs)
    if count:
        _finish[tiles(count)](
            highs, lows, len(lows), places, count, n, low, status, tile=TILE, **EXACT
        )  # fmt: skip
    return places


def _unary(stream: Tensor, highs: Tensor, status: Tensor, *, unary: bool) -> None:
    grid = tiles(len(stream), BYTES)
    numbers = torch.zeros(grid[0] + 1, dtype=torch.int32, device=stream.device)
    _count[grid](stream, len(stream), numbers, tile=BYTES, **EXACT)
    sums = numbers.cumsum(0, dtype=torch.int32)
    _rank[grid](stream, len(stream), sums, grid[0], highs, len(highs), status, unary=unary, tile=BYTES, **EXACT)


def _lows(room: int, low: int) -> int:
    """Bytes of all low bits."""
    return -(-room * low // 8)
