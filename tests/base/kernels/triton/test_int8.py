"""8-bit codes on a GPU have the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import at_large, broken, caught, compared, corpus, every_type, numbers, of, told

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.triton import int8

pytestmark = told


@of("int8")
@every_type
def test_bits_are_those_of_plain_torch(codec: Codec, dtype: torch.dtype, place: str | None) -> None:
    x, sizes = corpus(dtype)
    compared(codec, x, sizes, None if place is None else corpus(seed=1)[0], place or "apart")


@of("int8")
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 7]], ids=str)
def test_small_tensors(codec: Codec, sizes: list[int]) -> None:
    compared(codec, numbers("plain", sum(sizes)), sizes, numbers("plain", sum(sizes), 1))


@of("int8")
def test_large_tensors(codec: Codec) -> None:
    at_large(codec)


def test_mutants_are_caught() -> None:
    x, sizes = corpus()

    def rounded_up(x, sizes, block, key, residual):
        scales, codes = int8.int8_encode(x, sizes, block, key, residual)
        ties = (x * 2).frac().abs() == 0
        return scales, torch.where(ties & (codes < 127), codes + 1, codes)

    def of_another_key(x, sizes, block, key, residual):
        return int8.int8_encode(x, sizes, block, key and key + 1, residual)

    caught(broken(int8_encode=rounded_up)["int8"]["nearest"], x, sizes)
    twin = broken(int8_encode=of_another_key)["int8"]
    caught(twin["stochastic"], x, sizes)
    compared(twin["nearest"], x, sizes)  # which draws nothing


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5])
    for found in (int8, kernels):
        assert found.int8_encode(x, [8], 8)[1].tolist() == [127, 0, 2, 2, 0, -2, -2, 64]
