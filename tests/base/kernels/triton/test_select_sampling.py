"""Bounds that the k largest entries reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.triton.select import LOW, bounds
from gossamer.base.kernels.triton.spans import SAMPLE, Spans, spans

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy tails": lambda x: x**5,
    "by turns": lambda x: x * (torch.arange(len(x)) % 8 == 0),
    "a loud end": lambda x: torch.cat([x[:-9000] * 1e-3, x[-9000:]]),
}


def magnitudes(x: Tensor) -> Tensor:
    return x.float().abs().view(torch.int32)


def made(sizes: list[int], counts: list[int]) -> Spans:
    found = spans(sum(sizes), sizes, counts, CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bound_of_a_small_tensor_is_its_entry_of_that_rank(dtype: torch.dtype) -> None:
    sizes, counts = [SAMPLE, 65, 0, 1, 64], [100, 7, 0, 0, 1]
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)).to(dtype)
    found, lying = bounds(x, None, made(sizes, counts)), made(sizes, counts)
    for span, rank, bound in zip(x.split(sizes), lying.ranks.tolist(), found.tolist(), strict=True):
        ordered = magnitudes(span).sort(descending=True).values >> LOW << LOW
        assert bound == (int(ordered[rank - 1]) if rank else 0x7FFFFFFF >> LOW << LOW)


def test_the_bound_is_of_what_is_wanted() -> None:
    x, before = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    lying = made([1000], [10])
    assert torch.equal(bounds(x, before, lying), bounds(x + before, None, lying))
    assert not torch.equal(bounds(x, before, lying), bounds(x, None, lying))


def test_zeros_reach_no_bound() -> None:
    assert bounds(torch.zeros(107), None, made([100, 7], [3, 7])).tolist() == [1, 1]


def holds(x: Tensor, lying: Spans) -> bool:
    found = int((magnitudes(x) >= bounds(x, None, lying)).sum())
    return int(lying.counts) <= found <= lying.room


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_entries_reach_it_as_travel_and_no_more_than_there_is_room_for(kind: str) -> None:
    lying, narrow = made([200_000], [1000]), []
    for seed in range(12):
        x = KINDS[kind](torch.randn(200_000, generator=torch.Generator().manual_seed(seed)))
        assert holds(x, lying)
        narrow.append(holds(x, replace(lying, ranks=lying.counts // lying.strides)))
    assert not all(narrow)  # the twin: no margin
