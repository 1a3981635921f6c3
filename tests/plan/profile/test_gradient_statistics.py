import json
from dataclasses import asdict
from math import inf

import pytest
import torch

from gossamer.plan.profile import gradient_statistics
from gossamer.plan.profile.gradient_statistics import (
    NOISE_LARGEST_HUNDREDTH,
    RANKS,
    GradientObserver,
    GradientStatistics,
    energy,
    energy_of_largest,
    noise_singular_share,
    sign_agreement,
    signal_and_noise,
    singular_energies,
)

SHAPE = (96, 128)


@pytest.fixture
def draws():
    return torch.Generator().manual_seed(7)


def noise(draws, shape=SHAPE):
    return torch.randn(shape, generator=draws)


def observed(*batches):
    observer = GradientObserver()
    for batch in batches:
        observer.observe(batch if isinstance(batch, dict) else {"weight": batch})
    return observer.statistics()


# -- of one tensor ----------------------------------------------------------------------------------------------------


def test_the_largest_entries_are_found_by_magnitude():
    x = torch.tensor([1.0, -9.0, 2.0, 3.0])
    assert energy_of_largest(x, 0.25) == 81.0
    assert energy_of_largest(x, 0.26) == 81.0 + 9.0  # of 1.04 entries, two
    assert energy_of_largest(x, 1.0) == pytest.approx(95.0) == energy(x)


def test_without_magnitudes_the_largest_entry_would_be_another(monkeypatch):
    """A twin that forgets the sign finds 3."""
    monkeypatch.setattr(torch.Tensor, "abs", lambda x: x)
    assert energy_of_largest(torch.tensor([1.0, -9.0, 2.0, 3.0]), 0.25) == 9.0


def test_noise_has_the_stated_energy_in_its_largest_hundredth(draws):
    x = noise(draws, (2000, 1000))
    assert energy_of_largest(x, 0.01) / energy(x) == pytest.approx(NOISE_LARGEST_HUNDREDTH, rel=0.01)


@pytest.mark.parametrize("shape", [(96, 128), (128, 40), (5, 300)])
def test_singular_energies_are_those_of_a_planted_spectrum(draws, shape):
    few = min(shape)
    left = torch.linalg.qr(noise(draws, (shape[0], few))).Q
    right = torch.linalg.qr(noise(draws, (shape[1], few))).Q
    values = 0.7 ** torch.arange(few, dtype=torch.float32)
    truth = [float(values[:rank].square().sum()) for rank in RANKS]
    assert singular_energies(left @ torch.diag(values) @ right.T) == pytest.approx(truth, rel=1e-3)


def test_without_power_iterations_a_flat_spectrum_is_missed(draws, monkeypatch):
    x = noise(draws, (400, 300))
    truth = torch.linalg.svdvals(x).double().square()
    exact = [float(truth[:rank].sum()) for rank in RANKS]
    good = singular_energies(x)
    monkeypatch.setattr(gradient_statistics, "POWER_ITERATIONS", 0)
    hasty = singular_energies(x)
    for told, once, most in zip(good, hasty, exact, strict=True):
        assert once < told <= most * (1 + 1e-5)
        assert told > 0.8 * most
    assert hasty[-1] < 0.7 * exact[-1]


def test_noise_has_at_most_the_stated_share_in_its_first_directions(draws):
    x = noise(draws, (400, 300))
    for rank, found in zip(RANKS, singular_energies(x), strict=True):
        assert found / energy(x) <= noise_singular_share(400, 300, rank)
        assert found / energy(x) >= 0.7 * noise_singular_share(400, 300, rank)


def test_sign_agreement_is_exact_on_planted_signs():
    before, after = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0]), torch.tensor([2.0, 2.0, 1.0, 1.0, 0.0])
    assert sign_agreement(before, after) == 2 / 3  # zeros are not counted
    assert sign_agreement(before, before) == 1.0
    assert sign_agreement(before, -before) == 0.0
    assert sign_agreement(before, torch.zeros(5)) == 0.5
    assert float((before.sign() == after.sign()).float().mean()) == pytest.approx(0.4)  # a twin that counts zeros


def test_signal_and_noise_are_found_in_their_expectations():
    """Of |G|^2 = 9 and tr(Sigma) = 20, one batch has 29 and the mean of four 14."""
    assert signal_and_noise(29.0, 14.0, 4) == pytest.approx((9.0, 20.0))
    assert signal_and_noise(29.0, 14.0, 5) != pytest.approx((9.0, 20.0))


# -- of a model -------------------------------------------------------------------------------------------------------


def test_a_gradient_of_one_rank_lies_in_one_direction(draws):
    seen = observed(*(torch.outer(noise(draws, (96,)), torch.ones(128)) for _ in range(3)))
    assert seen.singular_shares == pytest.approx((1.0,) * 4)
    assert seen.largest_hundredth < 0.2
    flat = observed(noise(draws))
    assert flat.singular_shares is not None
    assert flat.noise_singular_shares is not None
    assert flat.singular_shares[0] < 0.05
    assert flat.singular_shares[2] <= flat.noise_singular_shares[2]


def test_a_sparse_gradient_lies_in_a_hundredth_of_its_entries(draws):
    sparse = torch.zeros(SHAPE)
    sparse.view(-1)[torch.randperm(sparse.numel(), generator=draws)[:12]] = noise(draws, (12,))
    seen = observed(sparse, sparse)
    assert seen.largest_hundredth == pytest.approx(1.0)
    assert seen.largest_thousandth == pytest.approx(1.0, abs=0.05)
    assert seen.sign_agreement == 1.0
    assert seen.noise_scale_batches == pytest.approx(0.0, abs=1e-9)
    assert observed(noise(draws)).largest_hundredth < 0.1


def test_independent_noise_has_a_large_noise_scale_and_no_agreement(draws):
    seen = observed(*(noise(draws) for _ in range(8)))
    assert seen.sign_agreement == pytest.approx(0.5, abs=0.02)
    assert seen.noise_energy == pytest.approx(96 * 128, rel=0.05)
    assert seen.noise_scale_batches is not None
    assert seen.noise_scale_batches > 50
    assert seen.steps_ratio(8, than=4) == pytest.approx(0.5, abs=0.02)


def test_a_planted_noise_scale_is_found(draws):
    """tr(Sigma) = 4 |G|^2, which eight batches find roughly."""
    signal = noise(draws) / 2
    seen = observed(*(signal + noise(draws) for _ in range(16)))
    assert seen.noise_scale_batches == pytest.approx(4.0, rel=0.15)
    assert seen.steps_ratio(8, than=4) == pytest.approx((1 + 0.5) / (1 + 1), rel=0.05)
    hasty = seen.noise_energy / energy(signal + noise(draws))  # a twin that takes one batch's energy for the signal's
    assert hasty < 1


def test_a_constant_gradient_has_no_noise_and_larger_batches_gain_nothing(draws):
    x = noise(draws)
    seen = observed(x, x, x)
    assert seen.noise_scale_batches == pytest.approx(0.0, abs=1e-6)
    assert seen.steps_ratio(8, than=4) == pytest.approx(1.0)


def test_where_noise_hides_the_signal_the_scale_is_infinite_and_json_still_finite():
    seen = observed(torch.ones(SHAPE), -torch.ones(SHAPE))
    assert seen.noise_scale_batches == inf
    assert seen.steps_ratio(8, than=4) == 0.5
    text = json.dumps(seen.to_json(), allow_nan=False)
    assert GradientStatistics.from_json(json.loads(text)) == seen


def test_one_batch_says_nothing_of_batches():
    seen = observed(torch.ones(SHAPE))
    assert (seen.sign_agreement, seen.noise_scale_batches, seen.signal_energy) == (None, None, None)
    assert seen.steps_ratio(8, than=4) == 1.0


def test_tensors_count_by_their_energy_and_small_ones_only_for_noise(draws):
    loud, quiet = torch.outer(torch.ones(96), torch.ones(128)), 1e-3 * noise(draws)
    seen = observed({"loud": loud, "quiet": quiet, "bias": torch.full((96,), 1e3)})
    assert seen.entries == 2 * 96 * 128
    assert seen.singular_shares is not None
    assert seen.singular_shares[0] == pytest.approx(1.0, abs=1e-4)
    evenly = observed({"loud": loud, "quiet": 1e3 * quiet})
    assert evenly.singular_shares is not None
    assert evenly.singular_shares[0] < 0.6


def test_models_without_matrices_are_looked_at_whole():
    seen = observed({"bias": torch.tensor([3.0, 4.0])})
    assert seen.singular_shares is None
    assert seen.largest_hundredth == 16 / 25


def test_observing_leaves_gradients_and_the_global_generator_alone(draws):
    x = noise(draws)
    kept, state = x.clone(), torch.get_rng_state()
    observed(x, x)
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("bad", [float("nan"), inf])
def test_batches_that_are_not_finite_are_counted_and_left_out(draws, bad):
    x, y = noise(draws), noise(draws)
    broken = x.clone()
    broken[0, 0] = bad
    observer = GradientObserver()
    for each in (broken, x, broken, y):
        observer.observe({"weight": each})
    assert (observer.seen_batches, observer.statistics().skipped_batches) == (4, 2)
    assert asdict(observer.statistics()) == {**asdict(observed(x, y)), "skipped_batches": 2}


def test_gradients_that_are_reused_in_place_are_distinguished(draws):
    observer, x = GradientObserver(), noise(draws)
    observer.observe({"weight": x})
    x.neg_()
    observer.observe({"weight": x})
    assert observer.statistics().sign_agreement == 0.0
