"""Places in few bits: against plain torch and against the definition; what no encoder wrote is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.base import kernels
from gossamer.base.kernels import coded_bytes, library
from gossamer.base.kernels.reference import index_coding as plain
from gossamer.errors import MalformedError

compiled = pytest.mark.skipif(
    not library.LIBRARY.exists() or os.environ.get("GOSSAMER_KERNELS") == "reference",
    reason="the compiled loops do not serve",
)
BOTH = [
    pytest.param(plain, id="plain"),
    pytest.param(
        kernels,
        id="compiled",
        marks=compiled,
    ),
]
both = pytest.mark.parametrize("made", BOTH)
sparing = settings(max_examples=150, deadline=None, derandomize=True)
Made = SimpleNamespace


@st.composite
def selections(draw: st.DrawFn, most: int = 3000) -> tuple[list[int], int, int]:
    """(places, n, room)"""
    n = draw(st.one_of(st.integers(1, 40), st.integers(1, most)))
    share = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    seed = draw(st.integers(0, 999))
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < share
    places = drawn.nonzero().view(-1).tolist()
    return places, n, len(places) + draw(st.sampled_from([0, 0, 1, 7, 200]))


def int32(places: Sequence[int]) -> Tensor:
    return torch.tensor(list(places), dtype=torch.int32)


@sparing
@given(selections())
def test_compiled_and_plain_write_and_read_the_same(selection: tuple[list[int], int, int]) -> None:
    places, n, room = selection
    coded = kernels.encode_places(int32(places), n, room)
    assert torch.equal(coded, plain.encode_places(int32(places), n, room))
    assert len(coded) == coded_bytes(room, n)
    for made in (plain, kernels):
        assert made.decode_places(coded, len(places), n, room).tolist() == places
        assert made.decode_places(coded, len(places), n, room).dtype == torch.int32


@both
def test_a_code_by_hand(made: Made) -> None:
    """n = 40, three places: three low bits each; 1 = 0|001, 10 = 1|010, 39 = 4|111; then bits 0+0, 1+1, 4+2."""
    assert plain.low_bits(3, 40) == 3
    assert made.encode_places(int32([1, 10, 39]), 40).tolist() == [0b11010001, 0b1, 0b01000101]
    assert plain.low_bits(3, 9) == plain.BITMAP
    assert made.encode_places(int32([0, 1, 8]), 9).tolist() == [0b11, 0b1]


def outcome(read: Callable[[Tensor, int, int, int], Tensor], *arguments: int, coded: Tensor) -> list[int] | None:
    try:
        return read(coded, *arguments).tolist()
    except MalformedError:
        return None


@sparing
@given(selections(200), st.data())
def test_any_bytes_mean_the_same_to_both_or_nothing(selection: tuple[list[int], int, int], data: st.DataObject) -> None:
    """The places are ascending and in range whatever arrived, or it is refused; bytes are changed one by one."""
    places, n, room = selection
    coded = plain.encode_places(int32(places), n, room).clone()
    for _ in range(data.draw(st.integers(0, 3))):
        if len(coded):
            coded[data.draw(st.integers(0, len(coded) - 1))] = data.draw(st.integers(0, 255))
    found = outcome(kernels.decode_places, len(places), n, room, coded=coded)
    assert found == outcome(plain.decode_places, len(places), n, room, coded=coded)
    if found is not None:
        assert all(a < b for a, b in pairwise(found))
        assert all(0 <= place < n for place in found)


def test_bytes_that_were_changed_are_sometimes_refused_and_sometimes_not() -> None:
    """So that the test before this one sees both."""
    coded = plain.encode_places(int32(range(0, 100, 9)), 100)
    found = []
    for at in range(len(coded)):
        spoilt = coded.clone()
        spoilt[at] ^= 0b100
        found.append(outcome(kernels.decode_places, 12, 100, 12, coded=spoilt))
    assert None in found
    assert any(places is not None for places in found)


@both
@pytest.mark.parametrize(
    ("coded", "count"),
    [
        (torch.zeros(3, dtype=torch.uint8), 3),
        (torch.zeros(2, dtype=torch.uint8), 3),
        (torch.zeros(3, dtype=torch.int8), 3),
        (torch.zeros(3, 1, dtype=torch.uint8), 3),
        (torch.full((3,), 255, dtype=torch.uint8), 3),
        (torch.zeros(3, dtype=torch.uint8), -1),
        (torch.zeros(3), 3),
    ],
    ids=["none set", "short", "signed", "a matrix", "all set", "fewer than none", "floats"],
)
def test_an_invalid_code_is_refused(made: Made, coded: Tensor, count: int) -> None:
    with pytest.raises(MalformedError):
        made.decode_places(coded, count, 40)


@compiled
@pytest.mark.parametrize("places", [[5, 5], [5, 4], [0, 40], [-1, 3]])
def test_places_out_of_order_are_not_encoded(places: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        kernels.encode_places(int32(places), 40, 10)


@both
@pytest.mark.parametrize("n", [2**24 + 5, 2**31 - 1])
def test_large_buffers(made: Made, n: int) -> None:
    places = [0, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, n - 1]
    if n == 2**24 + 5:
        places = sorted(set(places))
    coded = made.encode_places(int32(places), n)
    assert len(coded) < 40
    assert made.decode_places(coded, len(places), n).tolist() == places


def payload(places: list[int], n: int, seed: int) -> tuple[Tensor, Tensor]:
    values = torch.randn(len(places), generator=torch.Generator().manual_seed(seed))
    return values, plain.encode_places(int32(places), n)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 40_000), st.lists(st.integers(0, 9), max_size=4), st.sampled_from([1, 3, 4, 7]), st.booleans())
def test_sums_are_the_same_to_the_bit(n: int, seeds: list[int], divisor: int, onto: bool) -> None:
    chosen = [torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.05 * seed for seed in seeds]
    payloads = [payload(mask.nonzero().view(-1).tolist(), n, seed) for mask, seed in zip(chosen, seeds, strict=True)]
    start = torch.randn(n + 1, generator=torch.Generator().manual_seed(1))[1:]
    due, found = start.clone(), start.clone()
    plain.sparse_decode(payloads, due, divisor, onto=onto)
    kernels.sparse_decode(payloads, found, divisor, onto=onto)
    assert torch.equal(found.view(torch.int32), due.view(torch.int32))


@both
def test_nothing_is_written_before_all_payloads_were_checked(made: Made) -> None:
    good = payload([1, 7, 33], 40, 0)
    out = torch.full((40,), 5.0)
    for bad in (
        (good[0], good[1].flip(0)),
        (good[0], good[1][:-1]),
        (good[0][:2], good[1]),
        (good[0], good[1].to(torch.int32)),
    ):
        for onto in (False, True):
            with pytest.raises(MalformedError):
                made.sparse_decode([good, bad], out, 2, onto=onto)
            assert torch.equal(out, torch.full((40,), 5.0))
    made.sparse_decode([good], out)
    assert out.nonzero().view(-1).tolist() == [1, 7, 33]


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_are_served_by_plain_torch(made: Made, dtype: torch.dtype) -> None:
    values, coded = payload([1, 7, 33], 40, 0)
    out = torch.empty(40, dtype=dtype)
    made.sparse_decode([(values, coded), (values.double(), coded)], out, 2)
    torch.testing.assert_close(out[[1, 7, 33]], values.to(dtype))


def test_sums_onto_few_places_do_not_visit_the_others() -> None:
    """A buffer of 2^24 + 5 numbers of which only some pages exist would otherwise come to be."""
    n = 2**24 + 5
    out = torch.zeros(n)
    values, coded = payload([5, 2**24 + 1, n - 1], n, 3)
    kernels.sparse_decode([(values, coded)] * 2, out, 2, onto=True)
    assert torch.equal(out[[5, 2**24 + 1, n - 1]], values)
    assert int(out.count_nonzero()) == 3
