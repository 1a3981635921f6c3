"""Sums of entries on a GPU: the bits of plain torch, payload after payload."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.reference import index_coding as truth
from gossamer.base.kernels.triton import sparse as fast
from gossamer.errors import MalformedError, OutOfRange

N = 5000


def payload(seed: int, n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    places = (torch.rand(n, generator=generator) < 0.3).nonzero().view(-1).int()
    values = torch.randn(len(places), generator=generator)
    values[::7], values[1::7] = -0.0, 1e-42
    return values.to(dtype), truth.encode_places(places, n)


def start(n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(99))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize(("payloads", "divisor"), [(0, 1), (1, 1), (3, 1), (3, 3), (2, 7)])
def test_sums(payloads: int, divisor: int, onto: bool, dtype: torch.dtype) -> None:
    chosen = [payload(seed, dtype=dtype) for seed in range(payloads)]
    found, due = start(), start()
    fast.sparse_decode(chosen, found, divisor, onto=onto)
    truth.sparse_decode(chosen, due, divisor, onto=onto)
    assert same_bits(found, due)


def test_the_check_sees_payloads_in_another_order_and_products_instead_of_quotients() -> None:
    chosen = [payload(seed) for seed in range(3)]
    due, exchanged, multiplied = start(), start(), start()
    fast.sparse_decode(chosen, due, 3)
    fast.sparse_decode(chosen[::-1], exchanged, 3)
    fast.sparse_decode([(values * (1 / 3), coded) for values, coded in chosen], multiplied)
    assert not same_bits(due, exchanged)
    assert not same_bits(due, multiplied)


@pytest.mark.parametrize("n", [0, 1, 7, 65])
def test_small_buffers(n: int) -> None:
    found, due = start(n), start(n)
    for module, out in ((fast, found), (truth, due)):
        module.sparse_decode([payload(1, n), payload(2, n)], out, 2, onto=True)
    assert same_bits(found, due)


def test_nothing_is_written_before_all_payloads_were_checked() -> None:
    values = torch.randn(3)
    good = values, truth.encode_places(torch.tensor([1, 7, 33], dtype=torch.int32), 40)
    out = torch.full((40,), 5.0)
    for bad in (
        (good[0], good[1].flip(0)),
        (good[0], good[1][:-1]),
        (good[0][:2], good[1]),
        (good[0], good[1].to(torch.int32)),
        (torch.tensor([1.0, math.nan, 1.0]), good[1]),
        (torch.tensor([1.0, math.inf, 1.0]), good[1]),
    ):
        for onto in (False, True):
            with pytest.raises(MalformedError):
                fast.sparse_decode([good, bad], out, 2, onto=onto)
    with pytest.raises(OutOfRange):
        fast.sparse_decode([(torch.full((3,), 3e38), good[1])], out)
    assert torch.equal(out, torch.full((40,), 5.0))
    fast.sparse_decode([good], out)
    assert out.nonzero().view(-1).tolist() == [1, 7, 33]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_are_served_by_plain_torch(dtype: torch.dtype) -> None:
    values, coded = payload(1)
    found, due = torch.empty(N, dtype=dtype), torch.empty(N, dtype=dtype)
    for module, out in ((fast, found), (truth, due)):
        module.sparse_decode([(values, coded), (values.double(), coded)], out, 2)
    assert torch.equal(found, due)
