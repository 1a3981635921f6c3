"""Fixed point: linear codes, quantized sums and their ranges, and the same with noise."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from support.secure_federations import federate_securely, secure_recipe
from support.simulated_peers import expect_noticed
from torch import Tensor

from gossamer.algorithms.compressors import (
    Compressor,
    Dense,
    Feedback,
    RandomK,
    RandomProjection,
    Rotated,
    Route,
    random_projection,
)
from gossamer.algorithms.compressors.random_subspace import RandomSubspace
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import CentralPrivacy, DistributedPrivacy, FedAvg, SecureAggregation
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import Layout
from gossamer.base.peer_ops import Peer
from gossamer.errors import MalformedError, NotFinite, RecipeError
from gossamer.federated.messages import CLIENT, REPORT
from gossamer.federated.secure_aggregation import fixed_point as codes
from gossamer.federated.secure_aggregation.fixed_point import (
    UNITS,
    CohortTotal,
    FixedPoint,
    PrivateFixedPoint,
    fixed_point_of,
    linear_code,
)
from gossamer.federated.secure_aggregation.masking import SumRing

LAYOUT = Layout.of({"w": (16, 40), "b": (7,), "v": (3, 128)})
AT = AggregationContext(step=3, seed=5)
CODES = [
    Dense(),
    RandomK(0.1),
    RandomK(0.1, feedback=False),
    Rotated(Dense(), by="hadamard"),
    Rotated(RandomK(0.2), by="dct"),
    Route(Feedback(RandomK(0.1))),
    RandomProjection(2),
    RandomProjection(2, feedback=False),
    Rotated(RandomProjection(3), by="hadamard"),
    Route(Feedback(RandomProjection(2))),
    Route(Feedback(Rotated(RandomK(0.5), by="hadamard", block=64)), smallest=100),
]


def numbers(seed: int) -> torch.Tensor:
    return torch.randint(-9, 10, (LAYOUT.numel,), generator=torch.Generator().manual_seed(seed)).double()


def check_linear(compressor: Compressor) -> None:
    code = linear_code(compressor, SecureAggregation())
    parts = [code.project(numbers(seed), LAYOUT, AT) for seed in range(3)]
    assert {len(part) for part in parts} == {code.count(LAYOUT)}
    whole = code.expand(sum(parts, torch.zeros_like(parts[0])), LAYOUT, AT)
    each = sum((code.expand(part, LAYOUT, AT) for part in parts), torch.zeros(LAYOUT.numel, dtype=torch.float64))
    assert torch.allclose(whole, each, atol=1e-9, rtol=0)
    again = code.project(code.expand(parts[0], LAYOUT, AT), LAYOUT, AT)
    scaled = isinstance(compressor, RandomSubspace) and not compressor.feedback
    if not scaled:
        assert torch.allclose(again, parts[0], atol=1e-9, rtol=0)  # what was read stands for what travelled


@pytest.mark.parametrize("compressor", CODES, ids=repr)
def test_codes_are_linear(compressor: Compressor) -> None:
    check_linear(compressor)


def test_places_of_each_devices_own_are_noticed() -> None:
    class Own(codes.DrawnSubspace):
        def project(self, flat: torch.Tensor, layout: Layout, at: AggregationContext) -> torch.Tensor:
            return super().project(flat, layout, AggregationContext(step=int(flat[0]), seed=1))

    expect_noticed(codes, "DrawnSubspace", Own, lambda: check_linear(RandomK(0.1)))
    expect_noticed(codes, "DrawnSubspace", Own, lambda: check_linear(RandomProjection(2)))


def test_directions_that_are_not_orthonormal_are_noticed() -> None:
    random_projection._bases.cache_clear()
    try:
        expect_noticed(random_projection, "orthonormal_columns", list, lambda: check_linear(RandomProjection(2)))
    finally:
        random_projection._bases.cache_clear()


@pytest.mark.parametrize("compressor", [RandomK(0.25, feedback=False), RandomProjection(2, feedback=False)], ids=repr)
def test_what_is_scaled_is_right_on_average(compressor: Compressor) -> None:
    code = linear_code(compressor, SecureAggregation())
    x = numbers(0)
    found = [
        code.expand(code.project(x, LAYOUT, at), LAYOUT, at)
        for at in (AggregationContext(step=step) for step in range(500))
    ]
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / 500**0.5
    assert ((mean - x) / error.clamp_min(1e-9)).abs().max() < 5


def test_every_entry_in_any_dtype() -> None:
    code = linear_code(Rotated(Dense(), by="hadamard"), SecureAggregation())
    x = numbers(1).float()
    assert torch.allclose(code.expand(code.project(x, LAYOUT, AT), LAYOUT, AT), x, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("TopK(0.01)", "indices.*Write RandomK"),
        ("Int8()", r"its own scales.*SecureAggregation\(bits=8\)"),
        ("Chain(TopK(0.01), Int8())", "indices.*RandomK"),
        ("PowerSGD(2)", r"second round of masks. Write RandomProjection\(rank=2\)"),
        ("Dense('float16')", r"Omit Dense\(dtype='float16'\)"),
        ("Route(RandomK(0.1), rest=Int8())", "its own scales"),
        ("Rotated(TernGrad(), by='hadamard')", "not the message of the sum"),
    ],
)
def test_other_compressors_are_refused_with_the_reason(text: str, why: str) -> None:
    compressor = resolve(f"EveryStep() + {text}").compressor
    with pytest.raises(RecipeError, match=why):
        linear_code(compressor, SecureAggregation())


SMALL = Layout.of({"w": (20, 30), "b": (7,)})
N = SMALL.numel


def form(compressor: Compressor | None = None, blocks: int = 1, **fields: float | int | None) -> FixedPoint:
    secure = SecureAggregation(**fields)  # type: ignore[arg-type]
    return FixedPoint(secure, compressor or Dense(), SMALL, torch.float64, blocks)


def block_of(client: int, block: int = 0) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(client + 100 * block), dtype=torch.float64)


@pytest.mark.parametrize("bits", [2, 5, 16, 32])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_sum_of_messages_stands_for_the_sum_of_contributions(bits: int, blocks: int) -> None:
    own = form(blocks=blocks, bits=bits)
    ranges = (*(40.0, 80.0)[:blocks], 4.0)
    total = np.zeros(own.count, np.int64)
    for client in range(4):
        message = own.encode(
            [block_of(client, block) for block in range(blocks)],
            client + 1,
            3 * client,
            ranges,
            client=client,
            index=5,
        )
        assert len(message.integers) == own.count
        assert np.abs(message.integers).max() <= 2 ** (bits - 1) - 1
        total += message.integers
    found = own.decode(total, ranges, 4, 5)
    assert (found.weight, found.steps) == (10.0, 2 * 3 + 3 * 6 + 4 * 9)
    for block in range(blocks):
        want = sum((client + 1) * block_of(client, block) for client in range(4))
        step = 4.0 * ranges[block] / (2 ** (bits - 1) - 1)
        assert (found.sums[block] - want).abs().max() <= 4 * step
    assert found.too_large == (0,) * blocks


def test_rounding_is_right_on_average_and_drawn_again() -> None:
    own = form(bits=4)
    value, rounds = 0.3, 400
    found = [
        own.encode([torch.full((N,), value)], 1, 1, (1.0, 1.0), client=0, index=index).integers[:N] / 7
        for index in range(rounds)
    ]
    low = np.floor(value * 7) / 7
    chance = value * 7 - np.floor(value * 7)
    deviation = sqrt(chance * (1 - chance)) / 7 / sqrt(rounds * N)
    assert abs(np.mean(found) - value) < 4.5 * deviation + 1e-7
    assert abs(low - value) > 100 * deviation  # the twin: always down
    again = own.encode([torch.full((N,), value)], 1, 1, (1.0, 1.0), client=0, index=0).integers[:N] / 7
    assert again.tolist() == found[0].tolist()
    other = own.encode([torch.full((N,), value)], 1, 1, (1.0, 1.0), client=1, index=0).integers[:N] / 7
    assert other.tolist() != found[0].tolist()


def test_flags_and_ranges() -> None:
    own = form(blocks=2)
    total = np.zeros(own.count, np.int64)
    for client in range(3):
        blocks = [torch.full((N,), 2.0 if client else 0.5), torch.full((N,), 0.01)]
        total += own.encode(blocks, 1, 1, own.first_ranges, client=client, index=0).integers
    found = own.decode(total, own.first_ranges, 3, 0)
    assert (found.too_large, found.narrow) == ((2, 0), (0, 3))
    assert own.ranges_after((1.0, 1.0, 1.0), found, 3) == (8.0, 1 / 8, 1.0)
    assert own.ranges_after((1.0, 1.0, 1.0), found, 9) == (1.0, 1.0, 1.0)  # two of nine are fewer than a quarter
    assert form(blocks=2, clip=0.5).ranges_after((0.5, 0.5, 1.0), found, 3) == (0.5, 0.5, 1.0)
    assert form(clip=0.5).first_ranges == (0.5, 1.0)


def weights_after(weights: list[float], heaviest: float) -> float:
    """The range of weights after a round of such devices."""
    own = form()
    total = np.zeros(own.count, np.int64)
    for client, weight in enumerate(weights):
        total += own.encode([block_of(client)], weight, 1, (1.0, heaviest), client=client, index=0).integers
    return own.ranges_after((1.0, heaviest), own.decode(total, (1.0, heaviest), len(weights), 0), len(weights))[-1]


def test_weight_range_grows_to_fit_one_heavy_device() -> None:
    for few in (3, 12):
        weights = [1000.0] + [10.0] * (few - 1)
        assert [weights_after(weights, each) for each in (16.0, 128.0, 1024.0)] == [128.0, 1024.0, 1024.0]


def test_weight_range_stays_below_512_times_what_a_quarter_have() -> None:
    weights = [1e9] + [10.0] * 11
    assert weights_after(weights, 512.0) == 4096.0
    assert weights_after(weights, 640.0) == 640.0  # 10 is no more than 640 / 64
    assert weights_after(weights, 5120.0) == 640.0  # nor than 5120 / 512
    three_of_twelve = [1e9] * 3 + [10.0] * 9
    assert weights_after(three_of_twelve, 640.0) == 640.0
    assert weights_after([1e9] * 4 + [10.0] * 8, 640.0) == 5120.0


def test_one_of_three_devices_does_not_decide_the_ranges() -> None:
    own = form()
    total = np.zeros(own.count, np.int64)
    for client, size in enumerate((100.0, 0.5, 0.5)):
        total += own.encode([torch.full((N,), size)], 1, 1, own.first_ranges, client=client, index=0).integers
    assert own.ranges_after(own.first_ranges, own.decode(total, own.first_ranges, 3, 0), 3) == (1.0, 1.0)


@pytest.mark.parametrize("claim", [1.0, 1000.0, 1e9])
def test_weight_and_weighted_entries_are_limited_alike(claim: float) -> None:
    """Devices that learned the same have it as their mean, whatever weight one of them claims."""
    own, ranges = form(bits=32), (4.0, 16.0)
    same = block_of(0).clamp(-4.0, 4.0)
    total = np.zeros(own.count, np.int64)
    for client, weight in enumerate((claim, 10.0, 10.0)):
        total += own.encode([same], weight, 1, ranges, client=client, index=0).integers
    found = own.decode(total, ranges, 3, 0)
    assert found.weight == pytest.approx(min(claim, 16.0) + 20.0, rel=1e-8)
    torch.testing.assert_close(found.sums[0] / found.weight, same, atol=1e-7, rtol=0)


def test_what_is_cut_off_is_kept_by_feedback() -> None:
    for compressor in (Feedback(Dense()), Feedback(RandomK(0.25))):
        own = form(compressor, bits=5)
        block, owed = block_of(1), block_of(2)
        message = own.encode([block], 3, 1, (0.5, 4.0), client=0, index=0, residuals=({"residual": owed},))
        read = own.decode(message.integers, (0.5, 4.0), 1, 0).sums[0] / 3
        assert torch.allclose(read + message.residuals[0]["residual"], block + owed, atol=1e-12, rtol=0)
    assert form().encode([block_of(1)], 1, 1, (1.0, 1.0), client=0, index=0).residuals == ()


def check_nothing_is_lost(device: FixedPoint, server: FixedPoint, kept: float = 1.0) -> None:
    """What the server reads of three devices, and what these keep, are what they were given."""
    ranges, total = (20.0, 4.0), np.zeros(server.count, np.int64)
    given, owed = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for client in range(3):
        message = device.encode([block_of(client)], client + 1, 1, ranges, client=client, index=7)
        total += message.integers
        given += (client + 1) * block_of(client)
        owed += (client + 1) * kept * message.residuals[0]["residual"]
    torch.testing.assert_close(server.decode(total, ranges, 3, 7).sums[0] + owed, given, atol=1e-10, rtol=0)


@pytest.mark.parametrize("compressor", [Feedback(RandomK(0.1)), Feedback(RandomProjection(3))], ids=repr)
def test_sums_and_what_devices_keep_are_what_was_given(compressor: Compressor) -> None:
    own = form(compressor, bits=7)
    check_nothing_is_lost(own, own)
    with pytest.raises(AssertionError):
        check_nothing_is_lost(replace(own, seed=1), own)  # directions of another seed
    with pytest.raises(AssertionError):
        check_nothing_is_lost(own, own, kept=0.0)


def test_directions_cannot_make_a_number_too_large_for_the_sum() -> None:
    """The largest that a matrix can send: all of it along one direction, which every device draws alike."""
    projection, ring = RandomProjection(1), SumRing(bits=4, summands=9)
    own = form(Feedback(projection), bits=ring.bits)
    along = projection.bases(SMALL, own._at(0))["w"] @ torch.ones(1, 30, dtype=torch.float64)
    block = torch.cat([1e6 * along.view(-1), torch.zeros(7, dtype=torch.float64)])
    total = np.zeros(own.count, ring.dtype)
    for client in range(ring.summands):
        message = own.encode([block], 1, 1, (1.0, 1.0), client=client, index=0)
        read = own.decode(message.integers, (1.0, 1.0), 1, 0).sums[0]
        assert message.integers[:30].tolist() == [ring.largest] * 30
        assert torch.allclose(read + message.residuals[0]["residual"], block)  # what did not fit is not lost
        total += ring.wrapped(message.integers)
    assert ring.centered(total)[:30].tolist() == [ring.largest * ring.summands] * 30


def test_sums_that_no_honest_devices_have_are_refused() -> None:
    own, devices = form(), 2
    with pytest.raises(NotFinite):
        own.encode([block_of(0) / 0], 1, 1, (1.0, 1.0), client=7, index=0)
    heavy = [own.encode([block_of(0)], 1, 1, (1.0, 1.0), client=each, index=0).integers for each in range(devices + 1)]
    own.decode(sum(heavy[:devices], np.zeros(own.count, np.int64)), (1.0, 1.0), devices, 0)
    with pytest.raises(MalformedError, match=r"add up to 3, .* at most 1: one of the devices"):
        own.decode(sum(heavy, np.zeros(own.count, np.int64)), (1.0, 1.0), devices, 0)
    with pytest.raises(MalformedError, match="one of the devices sent invalid values"):
        own.decode(np.zeros(own.count, np.int64), (1.0, 1.0), devices, 0)
    for value in (-1, 2):
        flagged = heavy[0].copy()
        flagged[-1] = value
        with pytest.raises(MalformedError, match="flags of 1 devices"):
            own.decode(flagged, (1.0, 1.0), 1, 0)


def test_a_small_weight_counts_and_steps_are_cut() -> None:
    own = form()
    message = own.encode([block_of(0)], 1e-12, 2**30, (1.0, 8.0), client=0, index=0)
    read: CohortTotal = own.decode(message.integers, (1.0, 8.0), 1, 0)
    assert read.weight == 8.0 / UNITS
    assert read.steps == (2**20 - 1) * 8.0 / UNITS


PRIVATE_LAYOUT = Layout.of({"w": (4000,)})
PRIVACY = DistributedPrivacy(noise=1.0, clip=1.0)


def private_form(compressor: Compressor | None = None) -> PrivateFixedPoint:
    secure = SecureAggregation(bits=20)
    return PrivateFixedPoint(secure, compressor or Dense(), PRIVATE_LAYOUT, torch.float64, 1, 0, privacy=PRIVACY)


def sum_of(blocks: list[torch.Tensor], survivors: int) -> torch.Tensor:
    own = private_form()
    total = np.zeros(own.count, np.int64)
    for client, block in enumerate(blocks):
        total += own.encode([block], 1000.0, 99, (1.0,), client=client, index=0, survivors=survivors).integers
    found = own.decode(total, (1.0,), len(blocks), 0, survivors=survivors)
    assert (found.weight, found.steps) == (len(blocks), len(blocks))
    return found.sums[0]


def test_the_noise_of_the_survivors_is_all_of_it() -> None:
    noise = sum_of([torch.zeros(4000, dtype=torch.float64)] * 6, survivors=6)
    grid = private_form().grid(6)
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
    own = private_form(Feedback(RandomK(0.25)))
    (after,) = own.encode([block], 1, 1, (1.0,), client=0, index=3, survivors=3).residuals
    places = after["residual"] == 0
    assert int(places.sum()) == 1000
    assert torch.equal(after["residual"][~places], block[~places])
    assert private_form().encode([block], 1, 1, (1.0,), client=0, index=3, survivors=3).residuals == ()


def test_a_message_has_numbers_of_the_contribution_only() -> None:
    assert private_form().count == 4000
    assert private_form(RandomK(0.25)).count == 1000


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
