"""Device noise: a local contribution is clipped, then noisy; a report to a server that is not trusted says nothing."""

from __future__ import annotations

from math import sqrt

import torch

from gossamer.algorithms.strategies.federated import CentralPrivacy, LocalPrivacy
from gossamer.federated.messages import Report
from gossamer.federated.privacy.mechanisms import noised, private_report
from gossamer.federated.privacy.noise import SeededBits


def test_it_is_the_clipped_contribution_and_noise() -> None:
    blocks = (torch.full((50_000,), 1.0), torch.full((50_000,), -1.0, dtype=torch.float64))
    found = noised(blocks, LocalPrivacy(noise=3.0, clip=2.0), SeededBits(1))
    assert [block.dtype for block in found] == [torch.float32, torch.float64]
    for sign, block in zip((1, -1), found, strict=True):
        noise = block.double() - sign * 2.0 / sqrt(100_000)
        assert abs(float(noise.mean())) < 4.5 * 6.0 / sqrt(50_000)
        assert abs(float(noise.square().mean()) / 36.0 - 1) < 4.5 * sqrt(2 / 50_000)
    assert float(blocks[0].sum()) == 50_000  # only read


def test_a_report_tells_nothing_of_the_device() -> None:
    report = Report(samples=17, steps=5, learning_rate=0.1, metrics={"loss": 1.0}, counts=(3,), layout="x")
    assert private_report(report, CentralPrivacy(noise=1.0)) is report
    assert private_report(report, LocalPrivacy(noise=1.0)) == Report(samples=1, steps=1, counts=(3,), layout="x")
