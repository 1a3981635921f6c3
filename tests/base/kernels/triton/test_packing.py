"""Codes of any number of bits are the bytes of plain torch's, and are read from them."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra gpu is not installed")
tl = triton.language

from torch import Tensor  # noqa: E402

from gossamer.base.kernels.reference.bits import pack  # noqa: E402
from gossamer.base.kernels.triton import packing  # noqa: E402
from gossamer.base.kernels.triton.launch import EXACT  # noqa: E402

BLOCK, LENGTHS = 32, [32, 13, 0, 8]
WIDTHS = range(1, 17)


@triton.jit
def _packed(codes, packed, first_bytes, lengths, bits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr):
    row = tl.arange(0, rows)
    code = tl.load(codes + row[:, None] * block + tl.arange(0, block)[None, :])
    packing.store_codes(code, packed, tl.load(first_bytes + row), tl.load(lengths + row), bits)


@triton.jit
def _read(packed, codes, first_bytes, lengths, bits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr):
    row, within = tl.arange(0, rows), tl.arange(0, block)[None, :]
    here = within < tl.load(lengths + row)[:, None]
    found = packing.load_codes(packed, tl.load(first_bytes + row)[:, None], within, here, bits)
    tl.store(codes + row[:, None] * block + within, found)


def rows_of_codes(bits: int) -> Tensor:
    """The largest of so many bits among them; zero beyond each length."""
    codes = torch.randint(2**bits, (len(LENGTHS), BLOCK), generator=torch.Generator().manual_seed(bits))
    codes[:, 3:5] = 2**bits - 1
    codes[torch.arange(BLOCK)[None, :] >= torch.tensor(LENGTHS)[:, None]] = 0
    return codes.int()


def first_bytes(bits: int) -> Tensor:
    taken = [-(-length * bits // 8) for length in LENGTHS]
    return torch.tensor([0, *taken]).cumsum(0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_bytes_are_those_of_plain_torch(bits: int) -> None:
    codes, firsts = rows_of_codes(bits), first_bytes(bits)
    packed = torch.full((int(firsts[-1]) + 1,), 85, dtype=torch.uint8)
    _packed[(1,)](codes, packed, firsts, torch.tensor(LENGTHS), bits=bits, rows=len(LENGTHS), block=BLOCK, **EXACT)
    here = torch.cat([row[:length] for row, length in zip(codes, LENGTHS, strict=True)])
    each, sizes = (here[:, None] >> torch.arange(bits)) & 1, [length * bits for length in LENGTHS]
    assert torch.equal(packed[:-1], pack(each.reshape(-1), sizes, 8, 2))
    if bits > 1:  # the twin: the highest bit of each code first
        assert not torch.equal(packed[:-1], pack(each.flip(1).reshape(-1), sizes, 8, 2))
    assert packed[-1] == 85  # nothing is written beyond
    found = torch.full_like(codes, -1)
    _read[(1,)](packed, found, firsts, torch.tensor(LENGTHS), bits=bits, rows=len(LENGTHS), block=BLOCK, **EXACT)
    assert torch.equal(found, codes)
