"""Compiled selection against plain torch, bit for bit, with every instruction set that this processor has."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.base.kernels import Residual, above, largest, largest_with_momentum
from gossamer.base.kernels import library as native
from gossamer.base.kernels.reference import select
from gossamer.errors import NotFinite

pytestmark = pytest.mark.skipif(
    not native.LIBRARY.exists() or os.environ.get("GOSSAMER_KERNELS") == "reference",
    reason="the compiled loops do not serve",
)

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 1e-45, 3e38, -3e38, 0.5, 2.0, 1.0 + 2**-23]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": torch.round,
    "zeros": torch.zeros_like,
    "denormal": lambda x: x * 1e-40,
    "mostly -0.0": lambda x: torch.where(x.abs() < 1, -0.0, x),
    "ascending": lambda x: torch.arange(len(x), dtype=torch.float32),
    "descending": lambda x: -torch.arange(len(x), dtype=torch.float32).flip(0),
    "waves": lambda x: torch.sin(torch.arange(len(x)) / 50),
    "special": lambda x: torch.tensor(SPECIAL)[(x.abs() * 997).long() % len(SPECIAL)] / 2,
}
MODES = ["nothing owed", "apart", "in place"]


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["portable", "avx2", "avx512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[int]:
    library = native.library()
    assert library is not None
    level: int = library.gossamer_limit_instructions(request.param)
    if level != request.param:
        pytest.skip("this processor has no such instructions")
    yield level
    library.gossamer_limit_instructions(2)


def data(n: int, kind: str, seed: int, shift: int = 0) -> Tensor:
    """(n,) of a kind, `shift` elements into its memory."""
    x = KINDS[kind](torch.randn(n, generator=torch.Generator().manual_seed(seed)))
    return torch.cat([torch.zeros(shift), x])[shift:]


def residual(mode: str, before: Tensor, shift: int = 0) -> Residual | None:
    if mode == "nothing owed":
        return None
    mine = torch.cat([torch.zeros(shift), before])[shift:]
    return Residual(mine, mine if mode == "in place" else torch.empty(len(mine) + shift)[shift:])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


Largest = Callable[[Tensor, Sequence[int], Sequence[int], Residual | None], tuple[Tensor, Tensor]]


def check_largest(fast: Largest, x: Tensor, sizes: list[int], counts: list[int], before: Tensor, mode: str) -> None:
    kept, mine, due = x.clone(), residual(mode, before, 1), residual(mode, before)
    places, values = fast(x, sizes, counts, mine)
    due_places, due_values = select.largest(x, sizes, counts, due)
    assert same_bits(places, due_places)
    assert same_bits(values, due_values)
    assert same_bits(x, kept)
    if mine is not None and due is not None:
        assert same_bits(mine.after, due.after)
        assert mode == "in place" or same_bits(mine.before, before)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes, and for each a count."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 65, 130, 999, 5000, 20_000]), max_size=5))
    return sizes, [draw(st.sampled_from([0, min(1, size), size // 100, size // 3, size])) for size in sizes]


CASES = {
    "kind": st.sampled_from(sorted(KINDS)),
    "owed": st.sampled_from(sorted(KINDS)),
    "mode": st.sampled_from(MODES),
    "seed": st.integers(0, 99),
    "shift": st.integers(0, 3),
}
sparing = settings(max_examples=30, deadline=None, derandomize=True)


@sparing
@given(both=tensors(), **CASES)
def test_largest(
    instructions: int, both: tuple[list[int], list[int]], kind: str, owed: str, mode: str, seed: int, shift: int
) -> None:
    sizes, counts = both
    n = sum(sizes)
    check_largest(largest, data(n, kind, seed, shift), sizes, counts, data(n, owed, seed + 1), mode)


@sparing
@given(st.lists(st.sampled_from(SPECIAL), max_size=70), st.data(), st.sampled_from(MODES))
def test_largest_of_few(instructions: int, entries: list[float], draw: st.DataObject, mode: str) -> None:
    x = torch.tensor(entries)
    count = draw.draw(st.integers(0, len(x)))
    check_largest(largest, x, [len(x)], [count], x.flip(0) * 1e-3, mode)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_largest_of_many(instructions: int, kind: str) -> None:
    """So many that a sample is looked at first, and candidates are thinned out on the way."""
    n = 50_001
    for count, mode in ((50, "apart"), (15_000, "apart"), (500, "in place"), (500, "nothing owed")):
        check_largest(largest, data(n, kind, 1, 1), [n], [count], data(n, "normal", 2) * 0.5, mode)


def test_largest_where_caches_are_passed_by(instructions: int) -> None:
    sizes = [1, 300_000, 7, 300_001]
    x, before = data(sum(sizes), "normal", 1, 1), data(sum(sizes), "waves", 2)
    check_largest(largest, x, sizes, [1, 300, 7, 3000], before, "apart")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_largest_of_many_small_tensors(instructions: int, kind: str, mode: str) -> None:
    """Small enough that all of it is looked at, before and after the size from which on it is not."""
    sizes = [1000, 31, 32, 33, 2047, 2048, 2049, 1, 64, 999]
    counts = [10, 1, 16, 17, 16, 16, 16, 1, 2, 1]
    n = sum(sizes)
    check_largest(largest, data(n, kind, 5, 1), sizes, counts, data(n, "normal", 6) * 0.5, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("high", [0, 3, 9])
def test_largest_of_a_small_tensor_with_many_equals(instructions: int, mode: str, high: int) -> None:
    x = torch.ones(1000)
    x[500 : 500 + high] = -2.0
    check_largest(largest, x, [1000], [9], torch.zeros(1000), mode)


def test_a_misleading_sample_costs_time_and_nothing_else(instructions: int) -> None:
    n = 100_000
    x = torch.full((n,), 1e-3)
    x[:: n // (n // 64 // 16)] = 5.0  # every run of the sample begins nearby
    x[40_000:40_100] = 7.0
    for count in (10, 5_000):
        check_largest(largest, x, [n], [count], torch.zeros(n), "apart")


def last_among_equals(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], owed: Residual | None
) -> tuple[Tensor, Tensor]:
    places, values = select.largest(x.flip(0), sizes[::-1], counts[::-1], None)
    return (len(x) - 1 - places).flip(0).int(), values.flip(0)


def test_the_check_sees_ties_broken_the_other_way() -> None:
    x = data(1000, "ties", 0)
    check_largest(largest, x, [1000], [100], x, "nothing owed")
    with pytest.raises(AssertionError):
        check_largest(last_among_equals, x, [1000], [100], x, "nothing owed")


Momentum = Callable[..., tuple[Tensor, Tensor]]


def check_momentum(
    fast: Momentum, sizes: list[int], counts: list[int], kinds: list[str], rate: float = 0.9, **how: bool
) -> None:
    """The same entries, what is left of them, and momentum, in memory that is aligned otherwise."""
    n = sum(sizes)
    x, slow, before = (data(n, kind, seed) for seed, kind in enumerate(kinds))
    found = []
    for function, shift in ((fast, 3), (select.largest_with_momentum, 0)):
        momentum, owed = residual("apart", slow), residual("apart", before, shift)
        assert momentum is not None
        assert owed is not None
        taken = function(x, sizes, counts, rate, momentum, owed, **how)
        found.append((*taken, momentum.after, owed.after))
        assert same_bits(momentum.before, slow)
        assert same_bits(owed.before, before)
    for mine, due in zip(*found, strict=True):
        assert same_bits(mine, due)


@sparing
@given(
    both=tensors(),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3),
    rate=st.sampled_from([0.0, 0.9, 1 / 3, 1e-30]),
    nesterov=st.booleans(),
    masked=st.booleans(),
)
def test_largest_with_momentum(
    instructions: int, both: tuple[list[int], list[int]], kinds: list[str], rate: float, nesterov: bool, masked: bool
) -> None:
    check_momentum(largest_with_momentum, *both, kinds, rate, nesterov=nesterov, masked=masked)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_momentum_where_caches_are_passed_by(instructions: int, nesterov: bool, aligned: bool) -> None:
    sizes, counts = [1, 270_001, 7, 300_000], [1, 5000, 7, 300]
    n = sum(sizes)
    x, slow, before = data(n, "normal", 1), data(n, "waves", 2), data(n, "ties", 3)
    found = []
    for function, shift in ((largest_with_momentum, 0 if aligned else 1), (select.largest_with_momentum, 0)):
        momentum, owed = residual("apart", slow), residual("apart", before, shift)
        assert momentum is not None
        assert owed is not None
        taken = function(x, sizes, counts, 0.9, momentum, owed, nesterov=nesterov)
        found.append((*taken, momentum.after, owed.after))
    for mine, due in zip(*found, strict=True):
        assert same_bits(mine, due)


def test_momentum_in_place_and_of_other_types_goes_to_plain_torch() -> None:
    x = data(300, "normal", 1)
    for dtype in (torch.float32, torch.float64):
        slow, before = torch.ones(300, dtype=dtype), torch.zeros(300, dtype=dtype)
        places, _ = largest_with_momentum(x, [300], [9], 0.5, Residual(slow, slow), Residual(before, before))
        assert places.tolist() == (x + 0.5).abs().topk(9).indices.sort().values.tolist()
        assert torch.equal(slow == 0, before == 0)
        assert slow.count_nonzero() == 291


def rounded_once(
    x: Tensor, sizes: list[int], counts: list[int], rate: float, momentum: Residual, owed: Residual
) -> tuple[Tensor, Tensor]:
    """A twin: x + rate u is not rounded in between."""
    exact = x.double() + momentum.before.double() * torch.tensor(rate).double()
    return select.largest_with_momentum(exact.float(), sizes, counts, 0.0, momentum, owed)


def test_the_check_sees_momentum_that_is_rounded_otherwise() -> None:
    with pytest.raises(AssertionError):
        check_momentum(rounded_once, [1000], [10], ["normal"] * 3)


@sparing
@given(
    limit=st.sampled_from([0.0, -0.0, -1.0, 0.5, 3.0, 1e-42, math.inf, math.nan]),
    n=st.sampled_from([0, 1, 17, 999, 5000, 70_000]),
    **CASES,
)
def test_above(instructions: int, n: int, limit: float, kind: str, owed: str, mode: str, seed: int, shift: int) -> None:
    x, before = data(n, kind, seed, shift), data(n, owed, seed + 1)
    for room in (0, n // 30, n + 50):
        mine, due = residual(mode, before, 1), residual(mode, before)
        found, expected = above(x, limit, room, mine), select.above(x, limit, room, due)
        assert same_bits(found[0], expected[0])
        assert same_bits(found[1], expected[1])
        if mine is not None and due is not None:
            assert same_bits(mine.after, due.after)


def test_above_where_caches_are_passed_by(instructions: int) -> None:
    n = 2**19 + 3
    x, before = data(n, "normal", 1, 1), data(n, "waves", 2)
    for limit, room in ((0.5, n // 100), (2.5, n // 100), (3.9, n // 100), (1e9, 5)):
        mine, due = residual("apart", before, 1), residual("apart", before)
        assert mine is not None
        assert due is not None
        found, expected = above(x, limit, room, mine), select.above(x, limit, room, due)
        assert same_bits(found[0], expected[0])
        assert same_bits(found[1], expected[1])
        assert same_bits(mine.after, due.after)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 20, 3000])
def test_a_value_that_is_not_finite_is_refused(instructions: int, bad: float, mode: str, n: int) -> None:
    for place in {0, n // 2, n - 1}:
        for spoil_residual in (False, True):
            x, before = data(n, "normal", 3), data(n, "normal", 4)
            if spoil_residual and mode == "nothing owed":
                continue
            (before if spoil_residual else x)[place] = bad
            for sizes, counts in (([n], [0]), ([n], [n]), ([0, n], [0, min(n, 5)])):
                mine = residual(mode, before)
                with pytest.raises(NotFinite):
                    largest(x, sizes, counts, mine)
                with pytest.raises(NotFinite):
                    above(x, 0.1, 1, mine)
                if mine is not None and mode == "apart":
                    with pytest.raises(NotFinite):
                        largest_with_momentum(x, sizes, counts, 0.9, Residual(x * 0, torch.empty(n)), mine)
                assert mine is None or same_bits(mine.before, before)


def test_sums_that_leave_the_range_are_refused(instructions: int) -> None:
    x = torch.full((100,), 3e38)
    with pytest.raises(NotFinite):
        largest(x, [100], [3], Residual(x, torch.empty(100)))
    assert largest(x, [100], [3])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("sizes", [[9], [11], [20, -10]])
def test_sizes_that_do_not_fit_are_refused_as_by_plain_torch(sizes: list[int]) -> None:
    for function in (largest, select.largest):
        with pytest.raises((ValueError, RuntimeError)):
            function(torch.ones(10), sizes, [1] * len(sizes))
    for counts in ([11], [-1], [1, 1]):
        with pytest.raises((ValueError, RuntimeError)):
            largest(torch.ones(10), [10], counts)


def test_places_above_what_float32_counts() -> None:
    n = 2**24 + 5
    x = torch.zeros(n)
    spikes = [3, 2**24 - 1, 2**24 + 1, 2**24 + 3, n - 1]
    x[spikes] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    places, values = largest(x, [n], [5])
    assert places.tolist() == spikes
    assert values.tolist() == [1.0, -2.0, 3.0, -4.0, 5.0]
    found = above(x, 2.5, 9)
    assert found[0].tolist() == [2**24 + 1, 2**24 + 3, n - 1]
    assert found[1].tolist() == [3.0, -4.0, 5.0, *[0.0] * 6]
