"""Private fixed point: sums have all of the noise whoever stays, and nothing else of a device goes in."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from support.secure_federations import federate_securely, secure_recipe

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, RandomK
from gossamer.algorithms.strategies.federated import CentralPrivacy, DistributedPrivacy, FedAvg, SecureAggregation
from gossamer.base.layout import Layout
from gossamer.base.peer_ops import Peer
from gossamer.errors import RecipeError
from gossamer.federated.messages import CLIENT, REPORT
from gossamer.federated.secure_aggregation.fixed_point import FixedPoint, PrivateFixedPoint, fixed_point_of

LAYOUT = Layout.of({"w": (4000,)})
PRIVACY = DistributedPrivacy(noise=1.0, clip=1.0)


def form(compressor: Compressor | None = None) -> PrivateFixedPoint:
    secure = SecureAggregation(bits=20)
    return PrivateFixedPoint(secure, compressor or Dense(), LAYOUT, torch.float64, 1, 0, privacy=PRIVACY)


def sum_of(blocks: list[torch.Tensor], survivors: int) -> torch.Tensor:
    own = form()
    total = np.zeros(own.count, np.int64)
    for client, block in enumerate(blocks):
        total += own.encode([block], 1000.0, 99, (1.0,), client=client, index=0, survivors=survivors).integers
    found = own.decode(total, (1.0,), len(blocks), 0, survivors=survivors)
    assert (found.weight, found.steps) == (len(blocks), len(blocks))
    return found.sums[0]


def test_the_noise_of_the_survivors_is_all_of_it() -> None:
    noise = sum_of([torch.zeros(4000, dtype=torch.float64)] * 6, survivors=6)
    grid = form().grid(6)
    deviation = sqrt(grid.variance) * grid.unit
    assert deviation >= PRIVACY.noise * PRIVACY.clip
    score = (noise.square().mean().item() / deviation**2 - 1) / sqrt(2 / 4000)
    assert abs(score) < 4.5
    alone = sum_of([torch.zeros(4000, dtype=torch.float64)], survivors=6)  # the twin: one share is not enough
    assert alone.square().mean().item() < deviation**2 / 4


def test_contributions_are_clipped_together() -> None:
    large = sum_of([torch.full((4000,), 100.0, dtype=torch.float64)] * 50, survivors=50)
    assert abs(large.mean().item() - 50 / sqrt(4000)) < 4.5 * 1.1 / sqrt(4000)


def test_feedback_owes_what_did_not_travel_and_no_noise() -> None:
    block = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = form(Feedback(RandomK(0.25)))
    (after,) = own.encode([block], 1, 1, (1.0,), client=0, index=3, survivors=3).residuals
    places = after["residual"] == 0
    assert int(places.sum()) == 1000
    assert torch.equal(after["residual"][~places], block[~places])
    assert form().encode([block], 1, 1, (1.0,), client=0, index=3, survivors=3).residuals == ()


def test_a_message_has_numbers_of_the_contribution_only() -> None:
    assert form().count == 4000
    assert form(RandomK(0.25)).count == 1000


def test_rounds_under_privacy_tell_their_epsilon() -> None:
    everyone = secure_recipe(SecureAggregation(bits=20), privacy=DistributedPrivacy(noise=4.0, clip=1.0))
    run = federate_securely(everyone, rounds=1, leaving={2: REPORT})
    assert [sorted(each.reports) for each in run.commits] == [[0, 1, 3, 4]]
    assert run.commits[0].epsilon is not None
    assert run.commits[0].epsilon > 0
    assert all(report.samples == 1 for each in run.commits for report in each.reports.values())
    assert run.trace.ended[Peer(CLIENT, 0)].error is None
    assert bool(run.parameters.isfinite().all())
    assert float(run.parameters.abs().max()) > 0


def test_forms_follow_from_the_strategy() -> None:
    state = secure_recipe(SecureAggregation()).state
    secure = SecureAggregation(bits=20)
    plain = fixed_point_of(FedAvg(secure=secure), Dense(), state, 0)
    assert type(plain) is FixedPoint
    assert isinstance(fixed_point_of(FedAvg(secure=secure, privacy=PRIVACY), Dense(), state, 0), PrivateFixedPoint)
    with pytest.raises(RecipeError, match="has no masks"):
        fixed_point_of(FedAvg(), Dense(), state, 0)
    with pytest.raises(RecipeError, match=r"privacy=DistributedPrivacy\(noise=1.0\)"):
        fixed_point_of(FedAvg(secure=secure, privacy=CentralPrivacy(noise=1.0)), Dense(), state, 0)
