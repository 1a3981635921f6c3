"""Candidates: what reaches a bound, and where they are not complete, all entries in their place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.nightly import once_each
from torch import Tensor

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.reference import select as truth
from gossamer.base.kernels.triton import select
from gossamer.base.kernels.triton.candidates import Candidates, gathered
from gossamer.base.kernels.triton.select import thresholds
from gossamer.base.kernels.triton.spans import Spans, spans
from gossamer.base.kernels.triton.status import NOT_FINITE, fresh

SIZES, COUNTS = [20_000, 0, 65, 9000], [200, 0, 5, 90]
CPU = torch.device("cpu")


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed))


def lying(counts: list[int] = COUNTS) -> Spans:
    found = spans(sum(SIZES), SIZES, counts, CPU)
    assert found is not None
    return found


def bits(bound: float) -> int:
    return int(torch.tensor(bound).view(torch.int32))


def reaching(x: Tensor, bound: float, before: Tensor | None = None) -> Candidates:
    return gathered(x, before, lying(), torch.full((len(SIZES),), bits(bound), dtype=torch.int32), fresh(CPU))


@pytest.mark.parametrize("owes", [False, True])
def test_a_run_holds_the_entries_of_its_block_that_reach_the_bound(owes: bool) -> None:
    x, before = numbers(), numbers(1) if owes else None
    w = x if before is None else x + before
    found, blocks = reaching(x, 4.0 if owes else 2.5, before), lying().blocks
    assert found.found.sum() > 100
    for block in range(len(blocks)):
        first, length = int(blocks.starts[block]), int(blocks.lengths[block])
        due = first + (w[first : first + length].abs() >= (4.0 if owes else 2.5)).nonzero().view(-1)
        run = slice(int(found.starts[block]), int(found.starts[block] + found.lengths[block]))
        assert torch.equal(found.places[run], due.int())
        assert torch.equal(found.values[run], w[due])


def test_what_finds_no_room_is_counted_and_not_written() -> None:
    found = reaching(numbers(), 0.1)
    assert (found.found > lying().rooms)[[0, 3]].all()
    inside = [(first, first + size) for first, size in zip(lying().starts.tolist(), SIZES, strict=True)]
    for (least, end), places in zip(inside, found.places.split(lying().rooms.tolist()), strict=True):
        assert ((places >= least) & (places < end)).all()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_reported_wherever_it_lies(bad: float) -> None:
    for place in (0, 20_064, sum(SIZES) - 1):
        x, status = numbers(), fresh(CPU)
        x[place] = bad
        gathered(x, None, lying(), torch.full((len(SIZES),), bits(2.5), dtype=torch.int32), status)
        assert status.item() == NOT_FINITE


@once_each("bound, kind", [1e-45, 2.4, 4.0], ["normal", "ties", "zeros"])
def test_any_bound_leads_to_the_same_bits(bound: float, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too low a one, and there are more than there is room for; a good one; too high, and too few."""
    x = {"normal": numbers(), "ties": numbers().round(), "zeros": numbers() * (numbers(1) > 2.8)}[kind]
    monkeypatch.setattr(select, "bounds", lambda *_: torch.full((len(SIZES),), bits(bound), dtype=torch.int32))
    for found, expected in zip(select.largest(x, SIZES, COUNTS), truth.largest(x, SIZES, COUNTS), strict=True):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("bound", [0.5, 4.0])
def test_incomplete_candidates_tell_no_threshold(bound: float) -> None:
    """A twin that takes them for complete ones finds others."""
    x = numbers()
    due = [
        int(span.abs().topk(count).values.amin().view(torch.int32)) if count else 0x7FFFFFFF
        for span, count in zip(x.split(SIZES), COUNTS, strict=True)
    ]
    found = reaching(x, bound)
    assert thresholds(found)[0].tolist() == due
    trusting = replace(found, found=torch.minimum(found.found, lying().rooms).maximum(lying().counts))
    assert thresholds(trusting)[0].tolist() != due
