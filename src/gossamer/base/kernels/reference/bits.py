"""Bit packing: small codes, several to a byte. Every tensor starts at a byte; the rest of its last byte is zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.segments import blocks, by_block, expect
from gossamer.errors import MalformedError


def packed_bytes(sizes: Sequence[int], per_byte: int) -> int:
    """How many bytes `pack` makes of tensors of these sizes."""
    return blocks(sizes, per_byte)


def pack(codes: Tensor, sizes: Sequence[int], per_byte: int, base: int) -> Tensor:
    """(sum of sizes,) codes below `base` -> uint8: a byte is the sum of code k times base^k over its codes."""
    return (by_block(codes.to(torch.uint8), sizes, per_byte) * _weights(per_byte, base, codes.device)).sum(
        1, dtype=torch.uint8
    )


def unpack(stream: Tensor, sizes: Sequence[int], per_byte: int, base: int) -> Tensor:
    """Return the codes: (sum of sizes,) uint8. Raises MalformedError for bytes that `pack` never writes."""
    expect(stream, torch.uint8, packed_bytes(sizes, per_byte))
    refuse(stream > base**per_byte - 1)
    digits = (stream[:, None] // _weights(per_byte, base, stream.device)) % base
    kept, rest = [stream.new_empty(0)], [stream.new_empty(0)]
    for size, part in zip(sizes, digits.split([-(-size // per_byte) for size in sizes]), strict=True):
        kept.append(part.reshape(-1)[:size])
        rest.append(part.reshape(-1)[size:])
    refuse(torch.cat(rest) != 0)
    return torch.cat(kept)


def refuse(wrong: Tensor) -> None:
    """Raise MalformedError where anything is wrong."""
    if not wrong.is_meta and bool(wrong.any()):
        raise refused()


def refused() -> MalformedError:
    return MalformedError("a payload holds codes that no encoder writes: it was damaged, or packed in another way")


def _weights(per_byte: int, base: int, device: torch.device) -> Tensor:
    return torch.tensor([base**place for place in range(per_byte)], dtype=torch.uint8, device=device)
