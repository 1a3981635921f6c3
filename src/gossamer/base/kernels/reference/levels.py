"""Level quantization: a norm per block, and every entry on one of a few levels below it, right on average.

w = x + residual.before, or x. Arithmetic as in quantize.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.bits import pack, packed_bytes, refuse, unpack
from gossamer.base.kernels.reference.counter_rng import stochastic
from gossamer.base.kernels.reference.residual import Residual, wanted
from gossamer.base.kernels.reference.segments import average, block_sums, blocks, expect_numbers, sendable, spread


def level_bits(levels: int) -> int:
    """Bits for one of the numbers -levels to levels."""
    return (2 * levels).bit_length()


def level_bytes(sizes: Sequence[int], levels: int) -> int:
    """How many bytes the codes of tensors of these sizes take."""
    return packed_bytes(_stream_bits(sizes, levels), 8)


def levels_encode(
    x: Tensor, sizes: Sequence[int], block: int, levels: int, key: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(norms, codes): (blocks,) float32 and uint8, a stream of `level_bits` bits an entry, lowest bit first.

    norm = sqrt(sum of w^2) over a block (a power of two, summed by halves), unit = norm / levels, level = w / unit
    rounded as noise.stochastic does it, between -levels and levels; code = levels + level. Decodes to level unit.
    Raises NotFinite, also where a sum of squares is not finite.
    """
    w = wanted(x, residual)
    squares = sendable(block_sums(w.square(), sizes, block))
    norms = squares.double().sqrt().float()  # a float32 root may be off by a bit, as the processor's library likes
    unit = spread(norms / levels, sizes, block).to(w.dtype)
    whole = stochastic(w, unit, levels, key)
    if residual is not None:
        torch.sub(w, whole.to(w.dtype) * unit, out=residual.after)
    places = torch.arange(level_bits(levels), device=w.device)
    bits = ((whole + levels)[:, None] >> places) & 1
    return norms, pack(bits.view(-1), _stream_bits(sizes, levels), 8, 2)


def levels_decode(
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    block: int,
    levels: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    """Overwrite `out`: (n,) with the sum of the decoded (norms, codes), in the order given, divided by `divisor`.

    Raises MalformedError before anything is written.
    """
    for norms, _ in payloads:
        expect_numbers(norms, (blocks(sizes, block),), len(payloads))
    found = [_codes(packed, sizes, levels) - levels for _, packed in payloads]
    average(
        (
            whole.to(out.dtype) * spread(norms / levels, sizes, block).to(out.dtype)
            for whole, (norms, _) in zip(found, payloads, strict=True)
        ),
        out,
        divisor,
    )


def _stream_bits(sizes: Sequence[int], levels: int) -> list[int]:
    return [size * level_bits(levels) for size in sizes]


def _codes(packed: Tensor, sizes: Sequence[int], levels: int) -> Tensor:
    bits = unpack(packed, _stream_bits(sizes, levels), 8, 2).view(-1, level_bits(levels)).int()
    codes = (bits << torch.arange(level_bits(levels), device=packed.device)).sum(1, dtype=torch.int32)
    refuse(codes > 2 * levels)
    return codes
