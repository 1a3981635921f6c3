"""Signs and one of two magnitudes on a GPU have the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import at_large, broken, caught, compared, corpus, every_type, numbers, of, told

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.triton import sign_magnitude

pytestmark = told


@of("sign_magnitude")
@every_type
def test_bits_are_those_of_plain_torch(codec: Codec, dtype: torch.dtype, place: str | None) -> None:
    x, sizes = corpus(dtype)
    compared(codec, x, sizes, None if place is None else corpus(seed=1)[0], place or "apart")


@of("sign_magnitude")
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 7]], ids=str)
def test_small_tensors(codec: Codec, sizes: list[int]) -> None:
    compared(codec, numbers("plain", sum(sizes)), sizes, numbers("plain", sum(sizes), 1))


@of("sign_magnitude")
def test_large_tensors(codec: Codec) -> None:
    at_large(codec)


def test_mutants_are_caught() -> None:
    def of_other_blocks(x, sizes, block, residual):
        means, codes = sign_magnitude.sign_magnitude_encode(x, sizes, block, residual)
        return means.view(-1, 2).flip(1).reshape(-1), codes

    x, sizes = corpus()
    caught(broken(sign_magnitude_encode=of_other_blocks)["sign_magnitude"]["sign_magnitude"], x, sizes)


def test_of_equal_ones_none_is_large() -> None:
    x = torch.tensor([1.0, -1.0, -0.0, -2.0, 6.0, -8.0, 5.0, 5.0, 5.0, -5.0])
    means, codes = kernels.sign_magnitude_encode(x, [10], 8)
    assert means.tolist() == [1.0, 6.0, 5.0, 0.0]
    assert codes.tolist() == [0b10001000, 0b01011101, 0b1000]
