"""Sign codes on a GPU have the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import at_large, broken, caught, compared, corpus, every_type, numbers, of, told

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.triton import onebit

pytestmark = told


@of("onebit")
@every_type
def test_bits_are_those_of_plain_torch(codec: Codec, dtype: torch.dtype, place: str | None) -> None:
    x, sizes = corpus(dtype)
    compared(codec, x, sizes, None if place is None else corpus(seed=1)[0], place or "apart")


@of("onebit")
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 7]], ids=str)
def test_small_tensors(codec: Codec, sizes: list[int]) -> None:
    compared(codec, numbers("plain", sum(sizes)), sizes, numbers("plain", sum(sizes), 1))


@of("onebit")
def test_large_tensors(codec: Codec) -> None:
    at_large(codec)


def test_mutants_are_caught() -> None:
    def summed_along(x, sizes, block, residual):
        means = [each.abs().cumsum(0)[-1] / len(each) for each in x.split(block)]
        return torch.stack(means), kernels.onebit_encode(x, sizes, block, residual)[1]

    def zeros_are_negative(x, sizes, block, residual):
        return kernels.onebit_encode(torch.where(x == 0, -1e-45, x), sizes, block, residual)

    caught(broken(onebit_encode=summed_along)["onebit"]["onebit"], numbers("plain", 640), [640])
    caught(broken(onebit_encode=zeros_are_negative)["onebit"]["onebit"], numbers("zeros", 64), [64])


def test_sums_are_taken_by_halves() -> None:
    """From left to right it would be 2^24, and rounded once 2^24 + 8."""
    scales, _ = onebit.onebit_encode(torch.tensor([2.0**24] + [1.0] * 7), [8], 8)
    assert float(scales) * 8 == 2**24 + 6
