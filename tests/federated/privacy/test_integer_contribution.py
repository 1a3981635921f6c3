"""Integer contribution: bounded before noise, within its bits after it, and right on average in the sum."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from gossamer.algorithms.strategies.federated import DistributedPrivacy
from gossamer.errors import NotFinite
from gossamer.federated.privacy.mechanisms import _rounded, integers, mean_of
from gossamer.federated.privacy.noise import SeededBits

PRIVACY = DistributedPrivacy(noise=0.5, clip=2.0)
DEVICES, ENTRIES = 40, 3000


def blocks_of(device: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(device)
    return tuple(torch.randn(ENTRIES // 3, generator=random) * 0.01 * (device + 1) for _ in range(3))


def test_the_sum_is_the_clipped_mean_and_the_noise_that_was_asked_for() -> None:
    grid = PRIVACY.grid(ENTRIES, 16, DEVICES)
    each = [integers(blocks_of(device), grid, PRIVACY.mechanism, SeededBits(device)) for device in range(DEVICES)]
    assert all(int(given.abs().max()) <= grid.largest for given in each)
    total = torch.stack(each).sum(0)
    means = mean_of(total, DEVICES, grid, blocks_of(0))
    assert [block.shape for block in means] == [block.shape for block in blocks_of(0)]
    wanted = torch.zeros(ENTRIES, dtype=torch.float64)
    for device in range(DEVICES):
        flat = torch.cat(blocks_of(device)).double()
        wanted += flat * min(1.0, PRIVACY.clip / float(flat.norm())) / DEVICES
    noise = (torch.cat(means).double() - wanted) * DEVICES
    deviation = grid.unit * sqrt(grid.variance + DEVICES * 0.25)  # rounding adds up to a quarter a device
    assert abs(float(noise.mean())) < 4.5 * deviation / sqrt(ENTRIES)
    z = (float(noise.square().mean()) / (grid.unit**2 * grid.variance) - 1) * sqrt(ENTRIES / 2)
    assert abs(z) < 4.5
    assert float(noise.std()) == pytest.approx(PRIVACY.noise * PRIVACY.clip, rel=0.06)


@pytest.mark.parametrize("bits", [12, 16])
def test_rounding_keeps_the_norm(bits: int) -> None:
    grid = PRIVACY.grid(ENTRIES, bits, DEVICES)
    random = torch.Generator().manual_seed(0)
    for seed in range(20):
        scaled = torch.randn(ENTRIES, generator=random, dtype=torch.float64)
        scaled *= grid.units / scaled.norm()
        rounded = _rounded(scaled, grid.norm, SeededBits(seed))
        assert float(rounded.double().norm()) <= grid.norm
        assert float((rounded - scaled).abs().max()) < 1


def test_rounding_is_right_on_average() -> None:
    scaled = torch.full((40_000,), 0.3, dtype=torch.float64)
    found = _rounded(scaled, float("inf"), SeededBits(1)).double()
    assert abs(float(found.mean()) - 0.3) < 4.5 * sqrt(0.21 / len(found))


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(NotFinite):
        integers((torch.tensor([float("nan")]),), PRIVACY.grid(1, 16, 2), PRIVACY.mechanism)
