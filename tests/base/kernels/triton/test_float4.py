"""Signs and powers of two on a GPU have the bits of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import CODECS, at_large, broken, caught, compared, corpus, every_type, numbers, of, told

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.triton import float4

pytestmark = told

IN_ONE = replace(CODECS["float4"]["float4"], options=(64,))


@of("float4")
@every_type
def test_bits_are_those_of_plain_torch(codec: Codec, dtype: torch.dtype, place: str | None) -> None:
    x, sizes = corpus(dtype)
    compared(codec, x, sizes, None if place is None else corpus(seed=1)[0], place or "apart")


@of("float4")
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 7]], ids=str)
def test_small_tensors(codec: Codec, sizes: list[int]) -> None:
    compared(codec, numbers("plain", sum(sizes)), sizes, numbers("plain", sum(sizes), 1))


@of("float4")
def test_large_tensors(codec: Codec) -> None:
    at_large(codec)


def edges(largest: float) -> torch.Tensor:
    """A scale, and for every midpoint what is nearest to it in float32, with both neighbors."""
    middle = torch.tensor(float4.float4.MIDPOINTS, dtype=torch.float64) * float(torch.tensor(largest))
    middle = middle.float()
    near = [torch.nextafter(middle, torch.tensor(way)) for way in (0.0, torch.inf)]
    found = torch.cat([middle, *near, torch.zeros(10)])
    return torch.cat([torch.tensor([largest]), found, torch.tensor([largest]), -found])


@pytest.mark.parametrize(
    "largest", [1.0, 3.0, 1 / 3, 2 - 2**-23, 1 + 2**-23, 3e38, 1e-36, 2e-38, 37 * 2.0**-149, 2.0**-149]
)
def test_numbers_next_to_midpoints(largest: float) -> None:
    x = edges(largest)
    compared(IN_ONE, x, [len(x)])


def test_mutants_are_caught() -> None:
    def in_float32(x, sizes, block, residual):
        scales, _ = kernels.float4_encode(x, sizes, block, residual)
        middle = torch.tensor(float4.float4.MIDPOINTS)
        exponents = torch.bucketize(x.abs() / scales[0], middle, right=True)
        return scales, float4.float4.pack(
            torch.where((x < 0) & (exponents > 0), exponents + 8, exponents), sizes, 2, 16
        )

    def toward_zero(x, sizes, block, residual):
        return kernels.float4_encode(torch.nextafter(x, torch.zeros(1)), sizes, block, residual)

    for twin, x in ((in_float32, edges(2 - 2**-23)), (toward_zero, edges(1.0))):
        caught(replace(IN_ONE, module=broken(float4_encode=twin)["float4"]["float4"].module), x, [len(x)])
