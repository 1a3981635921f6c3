"""What should travel is read once, and refused where it cannot be sent."""

from __future__ import annotations

import math

import pytest
import torch
from support.nightly import once_each

triton = pytest.importorskip("triton", reason="the extra gpu is not installed")
tl = triton.language

from support.triton_codecs import CODECS, EVERY, broken, compared, numbers, told  # noqa: E402

from gossamer.base.kernels.reference.residual import Residual  # noqa: E402
from gossamer.base.kernels.triton import encoding  # noqa: E402
from gossamer.base.kernels.triton.code_format import CodeFormat  # noqa: E402
from gossamer.errors import NotFinite  # noqa: E402

pytestmark = told

SIZES = [12, 0, 1, 37, 100, 8]
N = sum(SIZES)
every_module = pytest.mark.parametrize("module", CODECS)


@once_each("name, number", EVERY, [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_noticed_in_x(name: str, number: float) -> None:
    for place in (0, 12, N - 1):
        x = numbers("plain", N)
        x[place] = number
        with pytest.raises(NotFinite):
            EVERY[name].encode(x, SIZES, None, plain=False)


@every_module
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_value_that_is_not_finite_is_noticed_in_half_precision(module: str, dtype: torch.dtype) -> None:
    codec = next(iter(CODECS[module].values()))
    x = numbers("plain", N).to(dtype)
    x[20] = math.inf
    with pytest.raises(NotFinite):
        codec.encode(x, SIZES, None, plain=False)


@every_module
def test_a_value_that_is_not_finite_is_noticed_in_what_is_owed_which_stays(module: str) -> None:
    codec = next(iter(CODECS[module].values()))
    before = numbers("plain", N)
    before[N - 1] = math.nan
    kept = before.clone()
    with pytest.raises(NotFinite):
        codec.encode(numbers("plain", N), SIZES, Residual(before, torch.empty(N)), plain=False)
    assert torch.equal(before.nan_to_num(7.0), kept.nan_to_num(7.0))


@once_each("name, size", EVERY, [1e20, 1e30, 3e38])
def test_numbers_near_the_end_of_the_range(name: str, size: float) -> None:
    """Sums, squares, or what is added, may leave it: where plain torch refuses, and nowhere else."""
    x = numbers("plain", 80).sign() * size
    compared(EVERY[name], x, [80])
    compared(EVERY[name], x, [80], x)


@triton.jit
def _ends(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    """Twice the least and the largest of a block; codes of no use beyond its end."""
    return 2.0 * tl.min(w, 1), 2.0 * tl.max(w, 1), tl.full(w.shape, 1, tl.int32)


@triton.jit
def _nothing(code, first, second, most: tl.constexpr):
    return 0.0


def test_both_numbers_of_a_block_are_checked_and_nothing_is_written_beyond_its_end() -> None:
    form = CodeFormat(_nothing, torch.uint8, 2, width=2)
    x, residual = torch.tensor([-1.0, -0.5, 4.0, -2.0]), Residual(torch.zeros(4), torch.zeros(4))
    found = encoding.encoded(form, _ends, x, [3, 1], 8, residual)
    assert found is not None
    assert found[0].tolist() == [-2, 8, -4, 0]
    assert found[1].tolist() == [0b010101, 0b01]
    assert torch.equal(residual.after, x)
    for large in (3e38, -3e38):  # twice that leaves the range
        with pytest.raises(NotFinite):
            encoding.encoded(form, _ends, torch.tensor([1.0, -1.0, large]), [3], 8, None)


def test_sizes_that_do_not_tile_are_not_served() -> None:
    x = numbers("plain", 16)
    assert encoding.encodable(x, [16], 16, None)
    assert not encoding.encodable(x, [15], 16, None)
    assert not encoding.encodable(x, [17, -1], 16, None)
    assert not encoding.encodable(x, [16], 16, Residual(x.double(), x.double()))
    assert not encoding.encodable(x, [16], 16, Residual(x[:15], x))
    assert broken()  # all kernels are there
