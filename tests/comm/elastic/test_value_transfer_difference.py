"""Exact differences: any bytes are restored, bits that did not change are not sent, and damaged groups are rejected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer.comm.elastic.value_transfer import WORD, decode_difference, encode_difference
from gossamer.errors import MalformedError


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 4096, 100_003])
def test_any_bytes_are_restored(size: int) -> None:
    base, part = random_bytes(size, 1), random_bytes(size, 2)
    for each in (part, base):
        assert torch.equal(decode_difference(encode_difference(each, base), size) ^ base, each)


def numbers(scale: float) -> tuple[Tensor, Tensor]:
    before = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    after = before * (1 + scale * torch.randn(50_000, generator=torch.Generator().manual_seed(1)))
    return before.view(torch.uint8), after.view(torch.uint8)


@pytest.mark.parametrize(("scale", "share"), [(0.0, 0.01), (1e-6, 0.4), (1e-3, 0.75), (1.0, 0.95)])
def test_numbers_that_changed_little_take_few_bytes(scale: float, share: float) -> None:
    before, after = numbers(scale)
    groups = encode_difference(after, before)
    assert sum(map(len, groups)) <= share * len(after)
    assert torch.equal(decode_difference(groups, len(before)) ^ before, after)


def test_damaged_groups_are_rejected() -> None:
    before, after = numbers(1e-3)
    groups = encode_difference(after, before)
    count = len(before) // WORD
    assert len(groups[-2]) < count, "nothing was compressed"
    damaged = [
        groups[:-1],
        [*groups[:-1], torch.zeros(1, dtype=torch.uint8)],
        [*groups[:3], groups[3][:-5], groups[4]],
        [*groups[:3], torch.zeros(9, dtype=torch.uint8), groups[4]],
        [*encode_difference(torch.cat([after, after]), torch.cat([before, before]))[:4], groups[4]],
    ]
    for each in damaged:
        with pytest.raises(MalformedError):
            decode_difference(each, len(before))
