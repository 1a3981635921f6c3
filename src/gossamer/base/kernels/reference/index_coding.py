"""Index coding: ascending places in few bits, and the sums of entries at places.

Elias 1974, Fano 1971: of `room` places below n, each place's lowest `low` bits are written as they are; the rest, which
ascends, in unary: bit (place >> low) + i is set for the i-th place. A bitmap of n bits where that is shorter. Sizes
depend on `room` and n only. Bit j of a stream is bit j % 8 of byte j // 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.finite import expect_summable
from gossamer.errors import MalformedError

BITMAP = -1


def coded_bytes(room: int, n: int) -> int:
    """How many bytes `encode_places` writes for up to `room` places below n."""
    low = low_bits(room, n)
    return _bytes(n) if low == BITMAP else _bytes(room * low) + _bytes(_high(room, n, low))


def low_bits(room: int, n: int) -> int:
    """How many low bits make the code shortest (the fewest of those); BITMAP where a bitmap is not longer."""
    if not room:
        return 0
    low = min(range(31), key=lambda bits: room * bits + _high(room, n, bits))
    return BITMAP if _bytes(n) <= _bytes(room * low) + _bytes(_high(room, n, low)) else low


def encode_places(places: Tensor, n: int, room: int | None = None) -> Tensor:
    """Code (k,) int32 places, strictly ascending and below n, with space for `room` >= k of them: uint8."""
    room = len(places) if room is None else room
    low = low_bits(room, n)
    if places.is_meta:
        return places.new_empty(coded_bytes(room, n), dtype=torch.uint8)
    wide = places.long()
    if low == BITMAP:
        return _set_bits(wide, n)
    order = torch.arange(len(wide), device=wide.device)
    bits = torch.arange(low, device=wide.device)
    lows = _set_bits((order[:, None] * low + bits)[(wide[:, None] >> bits) & 1 == 1], room * low)
    return torch.cat([lows, _set_bits((wide >> low) + order, _high(room, n, low))])


def decode_places(coded: Tensor, count: int, n: int, room: int | None = None) -> Tensor:
    """Return the `count` indices of a code: (count,) int32. Raises MalformedError for an invalid code."""
    room = count if room is None else room
    low = low_bits(room, n)
    if not (0 <= count <= room and coded.dtype == torch.uint8 and coded.shape == (coded_bytes(room, n),)):
        raise MalformedError(f"{count} places below {n} in {coded.dtype} {tuple(coded.shape)}: no such code")
    if coded.is_meta:
        return coded.new_empty(count, dtype=torch.int32)
    if low == BITMAP:
        places = _bits(coded).nonzero().view(-1)
    else:
        lows, highs = coded.split([_bytes(room * low), _bytes(_high(room, n, low))])
        places = _bits(highs).nonzero().view(-1)
        if len(places) == count:
            bits = _bits(lows)[: count * low].view(count, low).long()
            least = (bits << torch.arange(low, device=coded.device)).sum(1)
            places = ((places - torch.arange(count, device=coded.device)) << low) + least
    if len(places) != count or (count and (int(places[-1]) >= n or bool((places.diff() <= 0).any()))):
        raise MalformedError(f"{count} ascending places below {n} were announced, and the code holds others")
    return places.int()


def sparse_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], out: Tensor, divisor: int = 1, *, onto: bool = False
) -> None:
    """Overwrite `out`: (n,) with the sum of values / divisor at places, in the order given; with `onto`, add to it.

    payloads: (values, coded places) of one count each. Takes time in proportion to the entries where `onto`. Raises
    MalformedError before anything is written.
    """
    for values, _ in payloads:
        expect_summable(values, len(payloads))
    scatter(
        [(decode_places(coded, len(values), len(out)), values) for values, coded in payloads], out, divisor, onto=onto
    )


def scatter(entries: Sequence[tuple[Tensor, Tensor]], out: Tensor, divisor: int = 1, *, onto: bool = False) -> None:
    """As `sparse_decode`, of (places, values). The places come from `decode_places` and are not checked again."""
    if not onto:
        out.zero_()
    for places, values in entries:
        out.index_add_(0, places, values.to(out.dtype) / divisor)


def _high(room: int, n: int, low: int) -> int:
    return room + (max(n - 1, 0) >> low)


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _set_bits(places: Tensor, count: int) -> Tensor:
    """A stream of `count` bits, those at `places` set: (ceil(count / 8),) uint8."""
    bits = torch.zeros(_bytes(count) * 8, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=places.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _bits(stream: Tensor) -> Tensor:
    return ((stream[:, None] >> torch.arange(8, dtype=torch.uint8, device=stream.device)) & 1).view(-1)
