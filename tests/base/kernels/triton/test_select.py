"""Selection on a GPU against plain torch, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.nightly import nightly, once_each
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support import memory_traffic
from triton import knobs

from gossamer.base.kernels.reference import select as truth
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton import select
from gossamer.errors import NotFinite

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 1e-45, 3e38, -3e38, 0.5, 2.0, 1.0 + 2**-23]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": torch.round,
    "zeros": torch.zeros_like,
    "denormal": lambda x: x * 1e-40,
    "mostly -0.0": lambda x: torch.where(x.abs() < 1, -0.0, x),
    "ascending": lambda x: torch.arange(len(x), dtype=torch.float32),
    "last digit": lambda x: 1 + x.abs().round() * 2**-23,
    "special": lambda x: torch.tensor(SPECIAL)[(x.abs() * 997).long() % len(SPECIAL)] / 2,
}
SIZES = [7, 0, 1, 65, 0, 9000, 64]
COUNTS = [7, 0, 1, 10, 0, 700, 0]
MODES = ["nothing owed", "apart", "in place"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="counts what the interpreter reads and writes")


def data(n: int, kind: str, seed: int) -> Tensor:
    return KINDS[kind](torch.randn(n, generator=torch.Generator().manual_seed(seed)))


def residual(mode: str, before: Tensor) -> Residual | None:
    if mode == "nothing owed":
        return None
    mine = before.clone()
    return Residual(mine, mine if mode == "in place" else torch.full_like(mine, 7.0))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def check(fast: Any, due: Any, mode: str, before: Tensor) -> None:
    """Two functions of a residual: the same places, values and residuals."""
    mine, theirs = residual(mode, before), residual(mode, before)
    for found, expected in zip(fast(mine), due(theirs), strict=True):
        assert same_bits(found, expected)
    if mine is not None and theirs is not None:
        assert same_bits(mine.after, theirs.after)
        assert mode == "in place" or same_bits(mine.before, before)


def check_largest(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], mode: str, before: Tensor, twin: Any = truth.largest
) -> None:
    check(
        lambda owed: select.largest(x, sizes, counts, owed),
        lambda owed: twin(x, sizes, counts, owed),
        mode,
        before,
    )


@once_each("kind, mode", KINDS, MODES[1:])
def test_largest(kind: str, mode: str) -> None:
    x, before = data(sum(SIZES), kind, 1), data(sum(SIZES), "normal", 2) * 0.5
    check_largest(x, SIZES, COUNTS, mode, before)


@once_each("dtype, mode", [*TYPES, torch.float64], MODES)
def test_largest_of_other_types(dtype: torch.dtype, mode: str) -> None:
    x = data(sum(SIZES), "normal", 3)
    x[::3] *= 1e-6  # float16's denormal numbers
    check_largest(x.to(dtype), SIZES, COUNTS, mode, data(len(x), "normal", 4).to(torch.promote_types(dtype, x.dtype)))


@pytest.mark.parametrize("mode", ["in place", *nightly("nothing owed", "apart")])
def test_denormal_numbers_of_bfloat16(mode: str) -> None:
    x, before = data(sum(SIZES), "denormal", 15).bfloat16(), data(sum(SIZES), "denormal", 16)
    assert x.float().any()
    check_largest(x, SIZES, COUNTS, mode, before)
    check(
        lambda owed: momentum_of(select.largest_with_momentum, x, 0.9, owed, "apart"),
        lambda owed: momentum_of(truth.largest_with_momentum, x, 0.9, owed, "apart"),
        "apart",
        before,
    )


@pytest.mark.parametrize("counts", [[1], [1000], [20_000], *nightly([0], [19_999])], ids=str)
def test_largest_of_many(counts: list[int]) -> None:
    x = data(20_000, "ties", 5)
    check_largest(x, [20_000], counts, "nothing owed", x)


@once_each("n, kind", [0, 1, 7, 64, 65], ["normal", "ties", "zeros", "mostly -0.0"])
def test_largest_of_few(n: int, kind: str) -> None:
    x = data(n, kind, 12)
    for count in {0, min(n, 1), n // 3, max(n - 1, 0), n}:
        check_largest(x, [n], [count], "apart", x.flip(0))


@pytest.mark.parametrize("equals", [100, 15_000, *nightly(400)])
def test_more_entries_are_equal_to_the_last_one_than_travel(equals: int) -> None:
    """Few of them are candidates; of many all entries are looked at."""
    x = data(20_000, "normal", 13) * 0.1
    x[1 :: 20_000 // equals][:equals] = -1.0
    x[::7][:60] = 3.0
    for count in (60, 159):
        check_largest(x, [20_000], [count], "in place", torch.zeros_like(x))


def test_many_small_tensors() -> None:
    sizes = [each % 11 for each in range(30)]
    x = data(sum(sizes), "ties", 6)
    check_largest(x, sizes, [size // 3 for size in sizes], "apart", x)
    for empty in ([], [0], [0, 0]):
        check_largest(x[:0], empty, empty, "apart", x[:0])


def test_largest_of_all_equal_ones_with_some_larger() -> None:
    """More blocks than one hold equals; those before them decide how many are taken."""
    x = torch.ones(15_000)
    x[12_500:12_503] = -2.0
    for count in (2, 4_000, 14_500):
        check_largest(x, [15_000], [count], "nothing owed", x)


def last_among_equals(x: Tensor, sizes: Sequence[int], counts: Sequence[int], owed: object) -> tuple[Tensor, Tensor]:
    places, values = truth.largest(x.flip(0), sizes[::-1], counts[::-1], None)
    return (len(x) - 1 - places).flip(0).int(), values.flip(0)


def one_lost(x: Tensor, sizes: Sequence[int], counts: Sequence[int], owed: object) -> tuple[Tensor, Tensor]:
    spoilt = x.clone()
    spoilt[x.abs().argmax()] = 0
    return truth.largest(spoilt, sizes, counts, None)


def signed(x: Tensor, sizes: Sequence[int], counts: Sequence[int], owed: object) -> tuple[Tensor, Tensor]:
    places = x.topk(counts[0]).indices.sort().values
    return places.int(), x[places]


@pytest.mark.parametrize("twin", [last_among_equals, one_lost, signed])
def test_the_check_sees_broken_mutants(twin: Any) -> None:
    x = data(1000, "ties", 0)
    check_largest(x, [1000], [100], "nothing owed", x)
    with pytest.raises(AssertionError):
        check_largest(x, [1000], [100], "nothing owed", x, twin)


def test_the_check_sees_a_digit_that_is_left_out() -> None:
    def coarse(x: Tensor, sizes: Sequence[int], counts: Sequence[int], owed: object) -> tuple[Tensor, Tensor]:
        places, _ = truth.largest((x.view(torch.int32) & -1024).view(torch.float32), sizes, counts, None)
        return places, x[places]

    x = data(1000, "last digit", 0)
    check_largest(x, [1000], [100], "nothing owed", x)
    with pytest.raises(AssertionError):
        check_largest(x, [1000], [100], "nothing owed", x, coarse)


def momentum_of(function: Any, x: Tensor, rate: float, owed: Residual, mode: str, **named: bool) -> list[Tensor]:
    slow = residual(mode, data(len(x), "ascending", 0) * -1e-4)
    assert slow is not None
    return [*function(x, SIZES, COUNTS, rate, slow, owed, **named), slow.after]


@pytest.mark.parametrize("nesterov", [False, True])
@once_each("case, dtype", [(False, "apart"), (True, "apart"), (True, "in place")], TYPES)
def test_largest_with_momentum(nesterov: bool, case: tuple[bool, str], dtype: torch.dtype) -> None:
    masked, mode = case
    x, before = data(sum(SIZES), "normal", 7).to(dtype), data(sum(SIZES), "ties", 8)
    named = {"nesterov": nesterov, "masked": masked}
    check(
        lambda owed: momentum_of(select.largest_with_momentum, x, 0.9, owed, mode, **named),
        lambda owed: momentum_of(truth.largest_with_momentum, x, 0.9, owed, mode, **named),
        mode,
        before,
    )


def test_the_check_sees_momentum_that_is_rounded_otherwise() -> None:
    x, before = data(sum(SIZES), "normal", 7), data(sum(SIZES), "ties", 8)

    def rounded_once(x: Tensor, *lying: Any) -> Any:
        *lying, rate, slow, owed = lying
        exact = x.double() + slow.before.double() * torch.tensor(rate).double()
        return truth.largest_with_momentum(exact.float(), *lying, 0.0, slow, owed)

    with pytest.raises(AssertionError):
        check(
            lambda owed: momentum_of(select.largest_with_momentum, x, 0.9, owed, "apart"),
            lambda owed: momentum_of(rounded_once, x, 0.9, owed, "apart"),
            "apart",
            before,
        )


@once_each("limit, kind", [0.0, -0.0, -1.0, 0.5, 3.0, 1e-42, math.inf, math.nan, 0.1], ["normal", "special"])
def test_above(limit: float, kind: str) -> None:
    for n, mode in ((0, "apart"), (1, "apart"), (9000, "in place")):
        x, before = data(n, kind, 9), data(n, "ties", 10)
        x[: n // 9] = limit if math.isfinite(limit) else 0.5  # which is not above itself
        for room in {0, n // 30, n + 50} if n < 9000 else {n // 30, n}:
            check(
                lambda owed, x=x, room=room: select.above(x, limit, room, owed),
                lambda owed, x=x, room=room: truth.above(x, limit, room, owed),
                mode,
                before,
            )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_above_of_other_types(dtype: torch.dtype) -> None:
    x = data(5000, "normal", 11).to(dtype)
    for mode in MODES:
        check(
            lambda owed: select.above(x, 1.1, 3000, owed),
            lambda owed: truth.above(x, 1.1, 3000, owed),
            mode,
            x.float(),
        )


@once_each("bad, mode", [math.nan, -math.nan, math.inf, -math.inf], MODES)
def test_a_value_that_is_not_finite_is_refused_and_nothing_is_lost(bad: float, mode: str) -> None:
    n = 9000
    x, before = data(n, "normal", 3), data(n, "normal", 4)
    (x if mode == "nothing owed" else before)[n - 1] = bad
    for call in (
        lambda owed: select.largest(x, [0, n], [0, 5], owed),
        lambda owed: select.above(x, 0.1, n, owed),
    ):
        mine = residual(mode, before)
        with pytest.raises(NotFinite):
            call(mine)
        assert mine is None or same_bits(mine.before, before)
        assert mine is None or mode == "in place" or same_bits(mine.after, torch.full((n,), 7.0))


class NumbersRead(TorchDispatchMode):
    """Counts numbers of tensors that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["normal", "zeros"])
def test_the_host_reads_once_whether_all_is_finite_and_nothing_else(kind: str) -> None:
    x, read = data(9000, kind, 14), []
    for function in (select.largest, truth.largest):
        with NumbersRead() as numbers:
            function(x, [9000], [90], Residual(x, torch.empty_like(x)))
        read.append(numbers.count)
    assert read[0] == 1 < read[1]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's, of what is tested
def test_sums_that_leave_the_range_are_refused() -> None:
    x = torch.full((100,), 3e38)
    with pytest.raises(NotFinite):
        select.largest(x, [100], [3], Residual(x, torch.empty(100)))
    assert select.largest(x, [100], [3])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "counts"), [([9], [1]), ([11], [1]), ([20, -10], [1, 1]), ([10], [11]), ([10], [-1]), ([10], [1, 1])]
)
def test_sizes_that_do_not_fit_are_refused_as_by_plain_torch(sizes: list[int], counts: list[int]) -> None:
    for function in (select.largest, truth.largest):
        with pytest.raises((ValueError, RuntimeError)):
            function(torch.ones(10), sizes, counts)


def entries() -> dict[str, Tensor]:
    """Of a selection of one in a hundred, and where it writes."""
    n = 20_000
    names = "x", "slow", "slow after", "before", "after"
    return {name: data(n, "normal", seed) * (name in ("x", "before")) for seed, name in enumerate(names)}


def largest_of(on: dict[str, Tensor]) -> None:
    select.largest(on["x"], [len(on["x"])], [250], Residual(on["before"], on["after"]))


def largest_of_x(on: dict[str, Tensor]) -> None:
    select.largest(on["x"], [len(on["x"])], [250])


def above_of(on: dict[str, Tensor]) -> None:
    select.above(on["x"], 4.0, 1000, Residual(on["before"], on["after"]))


def above_of_x(on: dict[str, Tensor]) -> None:
    select.above(on["x"], 3.0, 1000)


def with_momentum(on: dict[str, Tensor]) -> None:
    slow, owed = Residual(on["slow"], on["slow after"]), Residual(on["before"], on["after"])
    select.largest_with_momentum(on["x"], [len(on["x"])], [250], 0.9, slow, owed)


def passes(call: Callable[[dict[str, Tensor]], None], on: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """How often kernels read and write every entry of each tensor, a sample and what is written of few left out."""
    with memory_traffic.counted(on) as found:
        call(on)
    return {
        name: (round(traffic.reads.mean() - 0.1), round(traffic.writes.mean() - 0.1))
        for name, traffic in found.items()
        if traffic.reads.any() or traffic.writes.any()
    }


TWICE = {"x": (2, 0), "before": (2, 0), "after": (0, 1)}


@interpreted
@pytest.mark.parametrize(
    ("call", "due"),
    [
        (largest_of_x, {"x": (1, 0)}),
        (largest_of, TWICE),
        (above_of_x, {"x": (1, 0)}),
        (above_of, TWICE),
        (with_momentum, {"x": (1, 0), "slow": (1, 0), "slow after": (2, 1), "before": (2, 0), "after": (0, 1)}),
    ],
)
def test_passes_over_memory(call: Callable[[dict[str, Tensor]], None], due: dict[str, tuple[int, int]]) -> None:
    assert passes(call, entries()) == due


@interpreted
def test_passes_over_memory_where_candidates_are_not_complete() -> None:
    """The count sees that a tensor is looked at once more for every digit, and by what orders."""
    assert passes(largest_of, entries() | {"x": torch.ones(20_000), "before": torch.zeros(20_000)}) == {
        "x": (7, 0),
        "before": (7, 0),
        "after": (0, 1),
    }
    zeros = torch.zeros(20_000)
    assert passes(largest_of, entries() | {"x": zeros, "before": zeros.clone()}) == {
        "x": (4, 0),
        "before": (4, 0),
        "after": (0, 1),
    }
