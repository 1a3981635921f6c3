"""Mechanisms: clipped norms, noise on devices and in the server's sum, and equal weights."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from laws.subjects import EVERY
from support.seeded_bits import SeededBits
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated_rules import (
    Aggregator,
    CentralPrivacy,
    DistributedPrivacy,
    FedAvg,
    LocalPrivacy,
)
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import NotFinite
from gossamer.federated.messages import Report
from gossamer.federated.privacy.accountant import PrivacyAccountant
from gossamer.federated.privacy.clipping_and_noise import (
    EqualMean,
    PrivateSum,
    _rounded,
    clip_factor,
    clipped,
    common_norm,
    integers,
    mean_of,
    noised,
    private_report,
    private_sum,
)
from gossamer.federated.server.aggregation import KeptContributions, WeightedSum, sum_for
from gossamer.train.parameter_server import shard_message


def norm_of(blocks: tuple[Tensor, ...]) -> float:
    return float(torch.cat([block.double() for block in blocks]).norm())


def test_all_tensors_are_scaled_together() -> None:
    blocks = (torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
    found = clipped(blocks, 1.0)
    torch.testing.assert_close(found[0], torch.tensor([0.6, 0.0], dtype=torch.float64))
    torch.testing.assert_close(found[1], torch.tensor([0.0, 0.8], dtype=torch.float64))
    alone = tuple(clipped((block,), 1.0)[0] for block in blocks)  # the twin: each by itself
    assert norm_of(alone) > 1.4
    assert norm_of(clipped(blocks, 6.0)) == 5.0  # what is within the bound stays as it is


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_norm_is_within_the_bound(scale: float, dtype: torch.dtype) -> None:
    draws = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scale
    blocks = tuple(draws.to(dtype).nan_to_num(posinf=6e4, neginf=-6e4))
    for bound in (1e-3, 1.0, 7.7):
        assert norm_of(clipped(blocks, bound)) <= bound
        assert norm_of(clipped(blocks, bound)) <= norm_of(blocks) * (1 + 1e-9)


def test_zeros_stay_and_too_large_a_norm_is_a_number() -> None:
    assert clipped((torch.zeros(3), torch.zeros(0)), 1.0)[0].tolist() == [0.0, 0.0, 0.0]
    assert common_norm((torch.tensor([3e38, 3e38]),)) == pytest.approx(3e38 * 2**0.5, rel=1e-6)
    assert clip_factor(float("inf"), 1.0) == 0.0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(number: float) -> None:
    assert min(1.0, float("nan")) == 1.0  # how it would pass
    with pytest.raises(NotFinite, match="not finite"):
        clipped((torch.ones(3), torch.tensor([0.0, number])), 1.0)


def test_integers_are_clipped_as_numbers() -> None:
    assert clipped((torch.tensor([3, 4]),), 1.0)[0].tolist() == pytest.approx([0.6, 0.8])


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


def test_integers_of_what_is_not_finite_are_refused() -> None:
    with pytest.raises(NotFinite):
        integers((torch.tensor([float("nan")]),), PRIVACY.grid(1, 16, 2), PRIVACY.mechanism)


LAYOUT = Layout.of({"weight": (32, 32), "bias": (32,)})
BOUND = 0.5
SENT = [each for each in EVERY if not any(isinstance(term, Compressor) and term.adapts for term in each.held())]


def accountant_of(noise: float, size: int, cohort: int = 4, blocks: int = 1, **options: float) -> PrivacyAccountant:
    privacy = CentralPrivacy(noise=noise, clip=BOUND, delta=1e-4, **options)  # type: ignore[arg-type]
    blank = [torch.empty(size, device="meta")] * blocks
    return PrivacyAccountant(privacy, cohort=cohort, clients=100, feedback=False, blank=blank, bits=SeededBits(1))


def sum_of(accountant: PrivacyAccountant) -> PrivateSum:
    assert isinstance(accountant.privacy, CentralPrivacy)
    return PrivateSum(accountant, accountant.privacy)


@pytest.mark.parametrize("compressor", SENT, ids=repr)
def test_no_decoded_contribution_is_above_the_clip_norm(compressor: Compressor) -> None:
    accountant = accountant_of(1e-9, LAYOUT.numel, cohort=1)
    for index in range(2):
        x = FlatTensors(torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(index)) * 10, LAYOUT)
        at = AggregationContext(step=index, seed=5)
        message = shard_message.encode(compressor, [x], shard_message.initial_states(compressor, [x], at), [at])
        decoded = shard_message.decode(compressor, message.payload, message.counts, [x], at)
        sums = sum_of(accountant)
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
    sums = sum_of(accountant_of(1e-9, 2, cohort=4, blocks=2))
    sums.add((torch.tensor([0.3, 0.0]), torch.tensor([0.0, 0.4])), 1e6, 50)  # of norm 0.5: all of it
    sums.add((torch.tensor([6.0, 0.0]), torch.tensor([0.0, 8.0])), 1.0, 1)  # of norm 10: a twentieth
    first, second = sums.means()
    torch.testing.assert_close(first, torch.tensor([0.15, 0.0]))
    torch.testing.assert_close(second, torch.tensor([0.0, 0.2]))  # over 4, though 2 came
    assert sums.summary(100) == sum_of(accountant_of(1.0, 2)).summary(100)  # what they did is not told


def test_the_noise_has_the_deviation_that_is_accounted_for() -> None:
    size = 100_000
    for noise, blocks in ((2.0, 1), (0.7, 2)):
        means = sum_of(accountant_of(noise, size, cohort=8, blocks=blocks)).means()
        assert len(means) == blocks  # also of nobody: a cohort that was drawn empty
        deviation = noise * BOUND / 8
        for each in means:
            z = (float(each.double().square().mean()) / deviation**2 - 1) * sqrt(size / 2)
            assert abs(z) < 4.5
            twin = (float((each / 2).double().square().mean()) / deviation**2 - 1) * sqrt(size / 2)
            assert abs(twin) > 100


def test_noise_is_drawn_once() -> None:
    sums = sum_of(accountant_of(1.0, 1000))
    assert torch.equal(sums.means()[0], sums.means()[0])
    assert sums.share_below() == sums.share_below()
    assert not torch.equal(sums.means()[0], sum_of(accountant_of(1.0, 1000, cohort=5)).means()[0])


def test_a_value_that_is_not_finite_is_refused_and_changes_nothing() -> None:
    sums = sum_of(accountant_of(1e-9, 2))
    with pytest.raises(NotFinite):
        sums.add((torch.tensor([float("nan"), 1.0]),), 1.0, 1)
    sums.add((torch.tensor([0.0, 0.0]),), 1.0, 1)
    assert float(sums.means()[0].abs().max()) < 1e-6
    assert sums.count == 1


class _First(Aggregator):
    def combine(self, contributions: Tensor, weights: Tensor) -> Tensor:
        return contributions[0]


def test_which_sum_a_strategy_gets() -> None:
    accountant = accountant_of(1.0, 2)
    assert isinstance(sum_for(FedAvg().aggregator), WeightedSum)
    assert isinstance(sum_for(_First()), KeptContributions)
    assert isinstance(private_sum(accountant), PrivateSum)
    local = LocalPrivacy(noise=1.0)
    equal = private_sum(PrivacyAccountant(local, cohort=2, clients=4, feedback=False))
    assert isinstance(equal, EqualMean)
    equal.add((torch.tensor([1.0]),), 100.0, 1)
    equal.add((torch.tensor([2.0]),), 1.0, 1)
    assert equal.means()[0].item() == 1.5
