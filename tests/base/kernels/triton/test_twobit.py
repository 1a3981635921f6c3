"""Two-bit codes on a GPU have the bits of plain torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import at_large, broken, caught, compared, corpus, every_type, numbers, of, told

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.triton import twobit

pytestmark = told


@of("twobit")
@every_type
def test_bits_are_those_of_plain_torch(codec: Codec, dtype: torch.dtype, place: str | None) -> None:
    x, sizes = corpus(dtype)
    compared(codec, x, sizes, None if place is None else corpus(seed=1)[0], place or "apart")


@of("twobit")
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 7]], ids=str)
def test_small_tensors(codec: Codec, sizes: list[int]) -> None:
    compared(codec, numbers("plain", sum(sizes)), sizes, numbers("plain", sum(sizes), 1))


@of("twobit")
def test_large_tensors(codec: Codec) -> None:
    at_large(codec)


@pytest.mark.parametrize("part", [0.1, 0.5, 1e-30, 2**0.5, 7.0])
def test_thresholds_are_measured_in_float64(part: float) -> None:
    """Squares beyond float32, and parts that float32 does not hold."""
    x = torch.cat([numbers("plain", 300) * 1e25, numbers("tiny", 30), numbers("plain", 65)])
    found, truth = (module.twobit_measured_encode(x, [395], 16, part) for module in (twobit, twobit.twobit))
    assert torch.equal(found[0], truth[0])
    assert torch.equal(found[1], truth[1])
    rounded = twobit.twobit.twobit_measured_encode(x, [395], 16, float(torch.tensor(part)) * (1 + 1e-7))
    assert not torch.equal(found[0], rounded[0])


def test_mutants_are_caught() -> None:
    def above(x, sizes, block, thresholds, residual):
        return kernels.twobit_encode(x, sizes, block, torch.nextafter(thresholds, torch.tensor(9.0)), residual)

    x = torch.linspace(0.2, 0.9, 10).repeat_interleave(64)  # thresholds themselves
    caught(broken(twobit_encode=above)["twobit"]["given"], x, [640])
    compared(broken()["twobit"]["given"], x, [640])


@pytest.mark.parametrize("threshold", [math.inf, math.nan, 0.0])
def test_thresholds_that_are_given_are_taken_as_they_are(threshold: float) -> None:
    """Nobody sends them, so they are not checked; and they stay as they are."""
    x, given = numbers("plain", 64), torch.full((1,), threshold)
    found, truth = (module.twobit_encode(x, [64], 64, given) for module in (twobit, twobit.twobit))
    assert torch.equal(found, truth)
    assert torch.equal(given, torch.full((1,), threshold)) or threshold != threshold
