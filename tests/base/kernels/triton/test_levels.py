"""Levels on a GPU have the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import CODECS, at_large, broken, caught, compared, corpus, every_type, numbers, of, told

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.triton import levels

pytestmark = told


@of("levels")
@every_type
def test_bits_are_those_of_plain_torch(codec: Codec, dtype: torch.dtype, place: str | None) -> None:
    x, sizes = corpus(dtype)
    compared(codec, x, sizes, None if place is None else corpus(seed=1)[0], place or "apart")


@of("levels")
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 7]], ids=str)
def test_small_tensors(codec: Codec, sizes: list[int]) -> None:
    compared(codec, numbers("plain", sum(sizes)), sizes, numbers("plain", sum(sizes), 1))


def test_large_tensors() -> None:
    at_large(CODECS["levels"]["7 levels"])


def test_mutants_are_caught() -> None:
    x, sizes = corpus()

    def of_another_key(x, sizes, block, levels, key, residual):
        return kernels.levels_encode(x, sizes, block, levels, key + 1, residual)

    caught(broken(levels_encode=of_another_key)["levels"]["7 levels"], x, sizes)


def test_one_level_more_than_two_bytes_hold_is_left_to_plain_torch() -> None:
    x, count = numbers("plain", 64), levels.MOST_LEVELS + 1
    found, truth = (module.levels_encode(x, [64], 64, count, 5) for module in (levels, levels.levelled))
    out = torch.empty(64), torch.empty(64)
    for module, into in zip((levels, levels.levelled), out, strict=True):
        module.levels_decode([found], [64], 64, count, into)
    assert torch.equal(found[1], truth[1])
    assert torch.equal(*out)
