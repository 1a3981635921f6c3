"""Contribution sum under privacy: bounded for every compressor, weighted alike, noisy as it was asked for."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from laws.subjects import EVERY
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated import Aggregator, CentralPrivacy, FedAvg, LocalPrivacy
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import NotFinite
from gossamer.federated.privacy.guard import PrivacyGuard
from gossamer.federated.privacy.mechanisms import EqualMean, PrivateSum, private_sum
from gossamer.federated.privacy.noise import SeededBits
from gossamer.federated.server.aggregation import KeptContributions, WeightedSum, sum_for
from gossamer.train.parameter_server import shard_message

LAYOUT = Layout.of({"weight": (32, 32), "bias": (32,)})
BOUND = 0.5
SENT = [each for each in EVERY if not any(isinstance(term, Compressor) and term.adapts for term in each.held())]


def guard_of(noise: float, size: int, cohort: int = 4, blocks: int = 1, **options: float) -> PrivacyGuard:
    privacy = CentralPrivacy(noise=noise, clip=BOUND, delta=1e-4, **options)  # type: ignore[arg-type]
    blank = [torch.empty(size, device="meta")] * blocks
    return PrivacyGuard(privacy, cohort=cohort, clients=100, feedback=False, blank=blank, bits=SeededBits(1))


def sum_of(guard: PrivacyGuard) -> PrivateSum:
    assert isinstance(guard.privacy, CentralPrivacy)
    return PrivateSum(guard, guard.privacy)


@pytest.mark.parametrize("compressor", SENT, ids=repr)
def test_no_decoded_contribution_is_above_the_clip_norm(compressor: Compressor) -> None:
    guard = guard_of(1e-9, LAYOUT.numel, cohort=1)
    for index in range(2):
        x = FlatTensors(torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(index)) * 10, LAYOUT)
        at = AggregationContext(step=index, seed=5)
        message = shard_message.encode(compressor, [x], shard_message.initial_states(compressor, [x], at), [at])
        decoded = shard_message.decode(compressor, message.payload, message.counts, [x], at)
        sums = sum_of(guard)
        sums.add(decoded, 17.0, 3)
        assert float(sums.means()[0].double().norm()) <= BOUND * (1 + 1e-6)


def test_a_decoder_may_give_more_than_was_encoded() -> None:
    """Why the server clips, whatever devices did."""
    from gossamer.algorithms.compressors import RandomK

    x = FlatTensors(torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0)), LAYOUT)
    x.flat.mul_(BOUND / x.flat.norm())
    at, compressor = AggregationContext(seed=5), RandomK(density=0.1, feedback=False)
    message = shard_message.encode(compressor, [x], shard_message.initial_states(compressor, [x], at), [at])
    (decoded,) = shard_message.decode(compressor, message.payload, message.counts, [x], at)
    assert float(decoded.norm()) > 2 * BOUND


def test_devices_weigh_alike_over_the_expected_cohort() -> None:
    sums = sum_of(guard_of(1e-9, 2, cohort=4, blocks=2))
    sums.add((torch.tensor([0.3, 0.0]), torch.tensor([0.0, 0.4])), 1e6, 50)  # of norm 0.5: all of it
    sums.add((torch.tensor([6.0, 0.0]), torch.tensor([0.0, 8.0])), 1.0, 1)  # of norm 10: a twentieth
    first, second = sums.means()
    torch.testing.assert_close(first, torch.tensor([0.15, 0.0]))
    torch.testing.assert_close(second, torch.tensor([0.0, 0.2]))  # over 4, though 2 came
    assert sums.summary(100) == sum_of(guard_of(1.0, 2)).summary(100)  # what they did is not told


def test_the_noise_has_the_deviation_that_is_accounted_for() -> None:
    size = 100_000
    for noise, blocks in ((2.0, 1), (0.7, 2)):
        means = sum_of(guard_of(noise, size, cohort=8, blocks=blocks)).means()
        assert len(means) == blocks  # also of nobody: a cohort that was drawn empty
        deviation = noise * BOUND / 8
        for each in means:
            z = (float(each.double().square().mean()) / deviation**2 - 1) * sqrt(size / 2)
            assert abs(z) < 4.5
            twin = (float((each / 2).double().square().mean()) / deviation**2 - 1) * sqrt(size / 2)
            assert abs(twin) > 100


def test_noise_is_drawn_once() -> None:
    sums = sum_of(guard_of(1.0, 1000))
    assert torch.equal(sums.means()[0], sums.means()[0])
    assert sums.share_below() == sums.share_below()
    assert not torch.equal(sums.means()[0], sum_of(guard_of(1.0, 1000, cohort=5)).means()[0])


def test_what_is_not_finite_is_refused_and_changes_nothing() -> None:
    sums = sum_of(guard_of(1e-9, 2))
    with pytest.raises(NotFinite):
        sums.add((torch.tensor([float("nan"), 1.0]),), 1.0, 1)
    sums.add((torch.tensor([0.0, 0.0]),), 1.0, 1)
    assert float(sums.means()[0].abs().max()) < 1e-6
    assert sums.count == 1


class _First(Aggregator):
    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        return contributions[0]


def test_which_sum_a_strategy_gets() -> None:
    guard = guard_of(1.0, 2)
    assert isinstance(sum_for(FedAvg().aggregator), WeightedSum)
    assert isinstance(sum_for(_First()), KeptContributions)
    assert isinstance(private_sum(guard), PrivateSum)
    local = LocalPrivacy(noise=1.0)
    equal = private_sum(PrivacyGuard(local, cohort=2, clients=4, feedback=False))
    assert isinstance(equal, EqualMean)
    equal.add((torch.tensor([1.0]),), 100.0, 1)
    equal.add((torch.tensor([2.0]),), 1.0, 1)
    assert equal.means()[0].item() == 1.5
