"""Ternary codes on a GPU: which entries travel, as plus or minus one scale of their tensor, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import ternary
from gossamer.base.kernels.reference.finite import summing_terms
from gossamer.base.kernels.reference.segments import blocks
from gossamer.base.kernels.triton.block_table import block_table
from gossamer.base.kernels.triton.finite import report_range
from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.noise import halves_of, paired
from gossamer.base.kernels.triton.stacking import fit, stacked
from gossamer.base.kernels.triton.status import MALFORMED, NOT_FINITE, expect_finite, found, fresh, report
from gossamer.base.kernels.triton.tiling import first_bytes_of, tileable
from gossamer.base.kernels.triton.wanted import INFINITE, magnitude, raw, signed, store_residual, wanted

BYTES = 1024  # per program: whole runs of 64, with entries 64 apart
RUN: tl.constexpr = tl.constexpr(ternary.APART[5])
UNIT: tl.constexpr = tl.constexpr(2.0**-24)


@lru_cache(maxsize=256)
def _places(sizes: tuple[int, ...], per_byte: int, device: torch.device) -> tuple[Tensor, ...]:
    """For each program its first entry, how many it has, their tensor, and its first byte."""
    table = block_table(sizes, BYTES * per_byte, device)
    first_bytes = first_bytes_of(sizes, BYTES * per_byte, 1, per_byte).to(device)
    return table.starts, table.lengths, table.owners, first_bytes


@triton.jit
def _program(starts, lengths, owners, first_bytes):
    program = tl.program_id(0)
    start, length = tl.load(starts + program), tl.load(lengths + program)
    return start, length, tl.load(owners + program), tl.load(first_bytes + program)


@triton.jit
def _entry(byte, k, length, per_byte: tl.constexpr):
    """Return the offset of the k-th entry of each byte among the `length` entries of a program."""
    neighbors = byte * per_byte + k
    if per_byte == 5:
        whole = length // (5 * RUN) * RUN
        neighbors = tl.where(byte < whole, byte // RUN * (5 * RUN) + k * RUN + byte % RUN, neighbors)
    return neighbors


@triton.jit
def _digit(packed, k: tl.constexpr, per_byte: tl.constexpr):
    """The k-th code of each byte."""
    if per_byte == 5:
        return packed // 3**k % 3
    else:
        return (packed >> (2 * k)) & 3


@triton.jit(do_not_specialize=["low", "high"])
def _ternary_encode(
    x, after, scales, codes, status, starts, lengths, owners, first_bytes, low, high,
    per_byte: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    start, length, owner, first_byte = _program(starts, lengths, owners, first_bytes)
    byte, scale = tl.arange(0, tile), tl.broadcast_to(tl.load(scales + owner), (tile,))
    base: tl.constexpr = 3 if per_byte == 5 else 4
    packed, largest = tl.zeros((tile,), tl.int32), tl.zeros((tile,), tl.int32)
    for before in tl.static_range(per_byte):
        within = _entry(byte, per_byte - 1 - before, length, per_byte)
        here, place = within < length, start + within
        w = wanted(x, None, place, here)
        largest = tl.maximum(largest, magnitude(w))
        drawn = paired(place, low, high, 24).to(tl.float32) * UNIT
        sent = here & (drawn * scale < tl.abs(w)) & (scale != 0)
        packed = packed * base + tl.where(sent, tl.where(w < 0, 2, 1), 0)
        store_residual(after, w - tl.where(sent, signed(w < 0, scale), 0.0), place, here)
    report(status, largest >= INFINITE, NOT_FINITE)
    tl.store(codes + first_byte + byte, packed.to(tl.uint8), mask=byte * per_byte < length)


def ternary_encode(
    x: Tensor, sizes: Sequence[int], scales: Tensor, key: int, per_byte: int, after: Tensor | None = None
) -> Tensor:
    """As reference.ternary.ternary_encode. Where `after` is x, it holds nothing useful after NotFinite."""
    fits = fit([scales], torch.float32, len(sizes), x) and tileable(sizes, x, *([] if after is None else [after]))
    if not (fits and per_byte in ternary.BASE):
        return ternary.ternary_encode(x, sizes, scales, key, per_byte, after)
    codes = torch.empty(blocks(sizes, per_byte), dtype=torch.uint8, device=x.device)
    places, status = _places(tuple(sizes), per_byte, x.device), fresh(x.device)
    buffers = raw(x), after, scales, codes, status
    _ternary_encode[(len(places[0]),)](*buffers, *places, *halves_of(key), **_shape(per_byte))
    expect_finite(status)
    return codes


@triton.jit
def _ternary_wrong(
    codes, status, starts, lengths, owners, first_bytes, step, per_byte: tl.constexpr, tile: tl.constexpr
):
    """Report invalid bytes of one payload, which is the second number of a program."""
    _, length, _, first_byte = _program(starts, lengths, owners, first_bytes)
    byte = tl.arange(0, tile)
    at = codes + tl.program_id(1).to(tl.int64) * step + first_byte + byte
    packed = tl.load(at, mask=byte * per_byte < length, other=0).to(tl.int32)
    entries = length - byte * per_byte  # of this byte and all behind it: only the last one may be short
    if per_byte == 5:
        most = tl.zeros_like(packed)
        for k in tl.static_range(5):
            most = tl.where(entries > k, 3 ** (k + 1) - 1, most)
        wrong = packed > most
    else:
        rest = packed >> (2 * tl.minimum(tl.maximum(entries, 0), 4))
        wrong = (rest != 0) | ((packed & (packed >> 1) & 0x55) != 0)  # a code of 3 has both bits
    report(status, wrong, MALFORMED)


@triton.jit
def _ternary_sum(
    codes, scales, out, starts, lengths, owners, first_bytes, step, payloads, divisor,
    per_byte: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    start, length, owner, first_byte = _program(starts, lengths, owners, first_bytes)
    byte, scale = tl.arange(0, tile), tl.broadcast_to(tl.load(scales + owner), (tile,))
    for k in tl.static_range(per_byte):
        total, at = tl.zeros((tile,), tl.int32), codes + first_byte + byte
        for _ in range(payloads):
            packed = tl.load(at, mask=byte * per_byte < length, other=0).to(tl.int32)
            digit = _digit(packed, k, per_byte)
            total += tl.where(digit == 2, -1, digit)
            at += step
        within = _entry(byte, k, length, per_byte)
        tl.store(out + start + within, tl.div_rn(total.to(tl.float32) * scale, divisor), mask=within < length)


def ternary_decode(
    payloads: Sequence[tuple[Tensor]],
    scales: Tensor,
    sizes: Sequence[int],
    per_byte: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    """As reference.ternary.ternary_decode."""
    codes = [packed for (packed,) in payloads]
    if not _decoded(codes, scales, sizes, per_byte, out, divisor):
        ternary.ternary_decode(payloads, scales, sizes, per_byte, out, divisor)


def _decoded(
    codes: Sequence[Tensor], scales: Tensor, sizes: Sequence[int], per_byte: int, out: Tensor, divisor: int
) -> bool:
    """Return False, without writing, if plain torch has to decode or to report an error."""
    fits = fit([scales], torch.float32, len(sizes), out) and tileable(sizes, out) and out.dtype == torch.float32
    known = bool(codes) and per_byte in ternary.BASE
    if not (fits and known and fit(codes, torch.uint8, blocks(sizes, per_byte), out)):
        return False
    places, status, (packed, step) = _places(tuple(sizes), per_byte, out.device), fresh(out.device), stacked(codes)
    report_range(scales, summing_terms(torch.float32, len(codes)), status)
    _ternary_wrong[(len(places[0]), len(codes))](packed, status, *places, step, **_shape(per_byte))
    if found(status):
        return False
    counts = step, len(codes), float(divisor)
    _ternary_sum[(len(places[0]),)](packed, scales, out, *places, *counts, **_shape(per_byte))
    return True


def _shape(per_byte: int) -> dict[str, Any]:
    return {"per_byte": per_byte, "tile": BYTES, **EXACT}
