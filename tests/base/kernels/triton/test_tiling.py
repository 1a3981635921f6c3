"""What kernels are handed, and what is left to plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import EVERY, compared, every_codec, numbers, told

from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton import tiling

pytestmark = told

CPU = torch.device("cpu")


def test_codes_of_every_tensor_begin_a_byte() -> None:
    found = tiling.tiling_of([9, 0, 17, 8], 8, 3, CPU)
    assert found.starts.tolist() == [0, 8, 9, 17, 25, 26]
    assert found.lengths.tolist() == [8, 1, 8, 8, 1, 8]
    assert found.first_bytes.tolist() == [0, 3, 4, 7, 10, 11]  # 27 bits take 4 bytes, and 51 take 7
    assert tiling.first_bytes_of([9, 0, 11], 5, 1, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("block", "together", "warps"), [(8, 128, 4), (1024, 1, 4), (4096, 1, 8), (2**14, 1, 16)])
def test_programs_are_filled_with_small_blocks(block: int, together: int, warps: int) -> None:
    found = tiling.tiling_of([10_000, 3], block, 8, CPU)
    assert (found.together, found.shape["num_warps"]) == (together, warps)
    assert found.grid == (-(-len(found.starts) // together),)


def test_only_whole_eights_are_read_at_once() -> None:
    assert [tiling.tiling_of(sizes, 64, 8, CPU).even for sizes in ([64, 8], [64, 9], [])] == [8, 1, 8]


@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_of_whole_eights_begin_at_multiples_of_their_bits(bits: int) -> None:
    """Which kernels are told; where a tensor ends within eight entries, those behind it begin anywhere."""
    even, odd = (tiling.tiling_of(sizes, 16, bits, CPU) for sizes in ([64, 8, 40], [64, 9, 40]))
    assert not (even.first_bytes % bits).any()
    assert odd.even == 1
    assert bits in (1, 8, 16) or (odd.first_bytes % bits).any()


@pytest.mark.parametrize("block", [1, 4, 7, 320, 2**15])
def test_blocks_that_no_program_holds_go_to_plain_torch(block: int) -> None:
    """And would be wrong in a program."""
    assert not tiling.halved(block)
    compared(Codec(EVERY["float4, float4"].module, tiling_truth(), "float4", (block,)), numbers("plain", 700), [700])


def tiling_truth() -> object:
    return EVERY["float4, float4"].truth


@every_codec
def test_other_numbers_and_buffers_go_to_plain_torch(codec: Codec) -> None:
    """float64, what lies apart, and shapes without data."""
    x = numbers("plain", 80)
    apart = torch.stack([x, x], 1)[:, 0]
    wide = codec.encode(x.double(), [80], Residual(x.double(), torch.empty(80, dtype=torch.float64)), plain=False)
    truth = codec.encode(x.double(), [80], Residual(x.double(), torch.empty(80, dtype=torch.float64)), plain=True)
    for found, expected in zip(wide, truth, strict=True):
        assert torch.equal(found, expected)
    compared(codec, apart, [80])
    if not codec.given:
        blank = codec.encode(x.to("meta"), [80], None, plain=False)
        assert [part.shape for part in blank] == [part.shape for part in truth]
