"""Adaptive clip: goes to the quantile of the norms that devices have."""

from __future__ import annotations

import pytest
import torch

from gossamer.algorithms.strategies.federated import CentralPrivacy
from gossamer.federated.privacy.guard import PrivacyGuard, next_clip
from gossamer.federated.privacy.mechanisms import PrivateSum
from gossamer.federated.privacy.noise import SeededBits


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_it_converges_to_the_quantile(quantile: float) -> None:
    privacy = CentralPrivacy(noise=1.0, delta=1e-4, quantile=quantile, first_clip=1.0, sampling="fixed")
    guard = PrivacyGuard(privacy, cohort=100, clients=1000, feedback=False, blank=[torch.empty(2)], bits=SeededBits(1))
    random = torch.Generator().manual_seed(0)
    visited: list[float] = []
    for number in range(100):
        norms = torch.empty(100).log_normal_(mean=1.0, std=0.5, generator=random)  # of median 2.72
        sums = PrivateSum(guard, privacy)
        for norm in norms:
            sums.add((torch.stack([norm, torch.zeros(())]),), 1.0, 1)
        guard.committed(range(100), sums.share_below())
        visited += [guard.clip] if number >= 40 else []
    wanted = float(torch.distributions.LogNormal(1.0, 0.5).icdf(torch.tensor(quantile)))
    assert sum(visited) / len(visited) == pytest.approx(wanted, rel=0.08)


def test_it_moves_by_the_formula_whatever_noise_says() -> None:
    assert next_clip(2.0, 0.5, 0.5, 0.2) == 2.0
    assert next_clip(2.0, 1.0, 0.5, 0.2) == pytest.approx(2.0 * 2.718281828459045**-0.1)
    assert next_clip(2.0, 1e9, 0.5, 0.2) == next_clip(2.0, 1.0, 0.5, 0.2) < 2.0
    assert next_clip(2.0, -1e9, 0.5, 0.2) == next_clip(2.0, 0.0, 0.5, 0.2) > 2.0
