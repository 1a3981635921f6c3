"""Four-bit and two-bit codes: what they stand for, that compiled loops equal plain torch, and what is refused."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import kernel_codecs as codecs
from support.kernel_codecs import bits, compiled
from torch import Tensor

from gossamer.base import rng
from gossamer.base.kernels import library
from gossamer.base.kernels import quantize as native_float4
from gossamer.base.kernels.reference import float4, sign_magnitude
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.errors import MalformedError, NotFinite

SIZES = (12, 0, 1, 37, 300, 9)


@dataclass(frozen=True)
class Pair:
    """An encoder and its decoder, in plain torch or compiled."""

    truth: Any
    name: str
    block: int

    def of(self, direction: str, plain: bool) -> Any:
        return getattr(self.truth if plain else native_float4, f"{self.name}_{direction}")

    def encode(self, x: Tensor, sizes: Sequence[int], residual: Residual | None, plain: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.of("encode", plain)(x, sizes, self.block, residual)
        return found

    def decode(
        self, payloads: Sequence[tuple[Tensor, ...]], sizes: Sequence[int], plain: bool, out: Tensor, divisor: int = 1
    ) -> Tensor:
        self.of("decode", plain)(payloads, sizes, self.block, out, divisor)
        return out


PAIRS = {
    "float4": Pair(float4, "float4", 256),
    "float4, small blocks": Pair(float4, "float4", 6),
    "float4, large blocks": Pair(float4, "float4", 5000),
    "sign_magnitude": Pair(sign_magnitude, "sign_magnitude", 512),
    "sign_magnitude, small blocks": Pair(sign_magnitude, "sign_magnitude", 8),
    "sign_magnitude, large blocks": Pair(sign_magnitude, "sign_magnitude", LARGEST_BLOCK),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
both = pytest.mark.parametrize("plain", [True, False], ids=["torch", "compiled"])


@pytest.fixture(params=[0, 1, 2], ids=["portable", "AVX2", "AVX-512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """At most this instruction set where loops are written for one."""
    limit = ctypes.CDLL(str(library.LIBRARY)).gossamer_limit_instructions
    limit(ctypes.c_int64(request.param))
    yield
    limit(ctypes.c_int64(2))


def numbers(kind: str, n: int, seed: int = 0) -> Tensor:
    """Those of all codecs, and such as lie where codes of four bits meet, and their neighbours."""
    if kind != "midpoints":
        return codecs.numbers(kind, n, seed)
    generator = rng.generator("midpoints", seed)
    x = torch.randn(n, generator=generator)
    pick = torch.randint(0, 8, (n,), generator=generator)
    near = torch.tensor([0.0, 1.0, -1.0])[pick % 3]
    edges = torch.tensor(float4.MIDPOINTS, dtype=torch.float32)[pick % 7] * x.sign()
    return torch.where(pick == 7, 3.0, torch.nextafter(3 * edges, 3 * edges + near))


same = partial(codecs.same, sums=((), *codecs.SUMS))


@compiled
@every_pair
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 257, 1279, 1281, 2600]), max_size=5),
    kind=st.sampled_from(["plain", "tiny", "small", "huge", "midpoints", "zeros", "equal", "mixed"]),
    seed=st.integers(0, 1000),
    shift=st.integers(0, 3),
    owed=st.booleans(),
)
def test_compiled_loops_equal_plain_torch(
    pair: Pair, sizes: list[int], kind: str, seed: int, shift: int, owed: bool
) -> None:
    x, before = (numbers(kind, sum(sizes) + 3, seed + i)[shift : shift + sum(sizes)] for i in (0, 1))
    same(pair, x, before if owed else None, sizes)


@compiled
@every_pair
def test_compiled_loops_of_every_instruction_set_equal_plain_torch(pair: Pair, instructions: None) -> None:
    for kind in ("plain", "midpoints", "mixed"):
        same(pair, numbers(kind, sum(SIZES)), numbers(kind, sum(SIZES), 1), SIZES)


@compiled
@pytest.mark.parametrize("pair", [PAIRS["float4"], PAIRS["sign_magnitude"]], ids=["float4", "sign_magnitude"])
def test_compiled_loops_serve_many_small_tensors_and_large_ones(pair: Pair) -> None:
    """So large that sums are written around the caches."""
    same(pair, numbers("plain", 530_001), numbers("plain", 530_001, 1), [101] * 50 + [524_951])


@both
def test_ties_are_rounded_away_from_zero(plain: bool) -> None:
    """And the numbers above hold ties: what is just below them has other codes."""
    x = numbers("midpoints", 200)
    ties = torch.tensor([1.0, *float4.MIDPOINTS])
    below = torch.cat([ties[:1], torch.nextafter(ties[1:], torch.zeros(7))])
    found = [float4_codes(each, plain).tolist() for each in (ties, below)]
    assert found == [[0x17, 0x32, 0x54, 0x76], [0x07, 0x21, 0x43, 0x65]]
    assert not torch.equal(float4_codes(x, plain), float4_codes(torch.nextafter(x, torch.zeros(200)), plain))


def float4_codes(x: Tensor, plain: bool) -> Tensor:
    return PAIRS["float4"].encode(x, [len(x)], None, plain)[1]


@both
def test_blocks_that_do_not_begin_at_a_byte_go_to_plain_torch(plain: bool) -> None:
    x = numbers("plain", 23)
    payload = Pair(float4, "float4", 5).encode(x, [23], None, plain)
    out = Pair(float4, "float4", 5).decode([payload], [23], plain, torch.empty(23))
    assert float((out - x).abs().max()) < float(x.abs().max()) / 3


@every_pair
@both
def test_in_place_the_residual_is_the_same(pair: Pair, plain: bool) -> None:
    x, before = numbers("plain", sum(SIZES)), numbers("plain", sum(SIZES), 1)
    apart, together = Residual(before, torch.empty_like(before)), before.clone()
    pair.encode(x, SIZES, apart, plain)
    pair.encode(x, SIZES, Residual(together, together), plain)
    assert torch.equal(bits(apart.after), bits(together))


@every_pair
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_is_not_sent_is_left(pair: Pair, dtype: torch.dtype, plain: bool) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x = numbers("plain", sum(SIZES)).to(dtype)
    residual = Residual(numbers("plain", sum(SIZES), 1).to(wide), torch.empty(sum(SIZES), dtype=wide))
    payload = pair.encode(x, SIZES, residual, plain)
    out = pair.decode([payload] * 3, SIZES, plain, torch.empty(sum(SIZES), dtype=wide), 3)
    torch.testing.assert_close(out + residual.after, x + residual.before, atol=2e-6, rtol=0)
    assert not torch.allclose(out - residual.after, x + residual.before, atol=2e-6, rtol=0)


@every_pair
@both
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_noticed_wherever_it_is(pair: Pair, plain: bool, number: float) -> None:
    zeros = torch.zeros(sum(SIZES))
    for place in (0, 11, 12, 13, 200, sum(SIZES) - 1):
        bad = numbers("plain", sum(SIZES))
        bad[place] = number
        for x, residual in (
            (bad, None),
            (bad, Residual(zeros, zeros.clone())),
            (zeros, Residual(bad, zeros.clone())),
        ):
            with pytest.raises(NotFinite):
                pair.encode(x, SIZES, residual, plain)


@both
def test_sums_that_leave_the_range_are_noticed(plain: bool) -> None:
    x = torch.full((64,), 3e38)
    with pytest.raises(NotFinite):
        PAIRS["sign_magnitude"].encode(x, [64], None, plain)
    with pytest.raises(NotFinite):
        PAIRS["float4"].encode(x, [64], Residual(x, torch.empty(64)), plain)
    scales, _ = PAIRS["float4"].encode(x, [64], None, plain)
    assert scales.tolist() == [float(x[0])]


@both
@pytest.mark.parametrize("damage", [0x08, 0x80, 0x88])
def test_a_zero_with_a_sign_is_refused_before_anything_is_written(plain: bool, damage: int) -> None:
    pair, n, out = PAIRS["float4"], 6000, torch.full((6000,), 7.0)
    good = pair.encode(numbers("plain", n), [n], None, plain)
    for place in (0, 700, len(good[1]) - 1):
        bad = (good[0], good[1].clone())
        bad[1][place] = damage
        with pytest.raises(MalformedError):
            pair.decode([good, bad], [n], plain, out)
    assert bool((out == 7).all())
    assert not bool((pair.decode([good, good], [n], plain, out) == 7).any())


@every_pair
@both
def test_what_is_left_of_a_byte_is_zero(pair: Pair, plain: bool) -> None:
    """Payloads that stand for the same are the same."""
    sizes, out = [9, 9], torch.full((18,), 7.0)
    good = pair.encode(numbers("plain", 18), sizes, None, plain)
    for place in (len(good[1]) // 2 - 1, len(good[1]) - 1):
        bad = (good[0], good[1].clone())
        bad[1][place] |= 1 << 6
        with pytest.raises(MalformedError):
            pair.decode([good, bad], sizes, plain, out)
    assert bool((out == 7).all())


@every_pair
@both
def test_payloads_of_another_size_or_type_are_refused(pair: Pair, plain: bool) -> None:
    first, codes = pair.encode(numbers("plain", sum(SIZES)), SIZES, None, plain)
    out = torch.full((sum(SIZES),), 7.0)
    for bad in ((first[:-1], codes), (first, codes[1:]), (first.double(), codes), (first, codes.int())):
        with pytest.raises(MalformedError):
            pair.decode([(first, codes), bad], SIZES, plain, out)
    assert bool((out == 7).all())


@every_pair
def test_shapes_are_known_without_data(pair: Pair) -> None:
    x = numbers("plain", sum(SIZES))
    payload, blank = (pair.encode(each, SIZES, None, False) for each in (x, x.to("meta")))
    assert [(part.shape, part.dtype) for part in payload] == [(part.shape, part.dtype) for part in blank]
    assert pair.decode([blank], SIZES, False, torch.empty(sum(SIZES), device="meta")).shape == x.shape


@every_pair
@both
def test_zeros_stay_zeros(pair: Pair, plain: bool) -> None:
    x = torch.zeros(sum(SIZES))
    residual = Residual(torch.zeros_like(x), torch.full_like(x, 5.0))
    payload = pair.encode(x, SIZES, residual, plain)
    assert torch.equal(pair.decode([payload, payload], SIZES, plain, torch.full_like(x, 7.0), 2), x)
    assert torch.equal(residual.after, x)


@both
def test_four_bits_by_hand(plain: bool) -> None:
    x = torch.tensor([64.0, 48.0, 47.99, -24.0, -1.0, 0.5, 0.499, -0.499, 0.0, -0.0, 1.49])
    scales, codes = PAIRS["float4"].encode(x, [11], None, plain)
    assert scales.tolist() == [64.0]
    assert codes.tolist() == [0x77, 0xE6, 0x19, 0x00, 0x00, 0x1]
    out = PAIRS["float4"].decode([(scales, codes)], [11], plain, torch.empty(11))
    assert out.tolist() == [64.0, 64.0, 32.0, -32.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@both
def test_two_bits_by_hand(plain: bool) -> None:
    x = torch.tensor([1.0, -1.0, -0.0, -2.0, 6.0, -8.0, 5.0, 5.0, 5.0, -5.0])
    means, codes = PAIRS["sign_magnitude, small blocks"].encode(x, [10], None, plain)
    assert means.tolist() == [1.0, 6.0, 5.0, 0.0]  # of equal ones none is above their mean
    assert codes.tolist() == [0b10001000, 0b01011101, 0b1000]
    out = PAIRS["sign_magnitude, small blocks"].decode([(means, codes)], [10], plain, torch.empty(10))
    assert out.tolist() == [1.0, -1.0, 1.0, -1.0, 6.0, -6.0, 6.0, 6.0, 5.0, -5.0]
