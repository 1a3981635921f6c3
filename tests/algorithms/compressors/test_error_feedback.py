"""Feedback with a decaying residual, against its rule computed by hand."""

from __future__ import annotations

import pytest
import torch
from laws.laws import Group
from support.resumed_training import check_resume
from torch import Tensor

from gossamer.algorithms.compressors import (
    Chain,
    Compressor,
    Dense,
    Feedback,
    Int8,
    PowerSGD,
    Sharded,
    SparseSum,
    Threshold,
    TopK,
)
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.sharded import is_unsent
from gossamer.algorithms.recipes.parser import parse
from gossamer.base.layout import Layout

FOUR = Layout.of({"w": (4,)})
HALF = TopK(density=0.5)


def steps(compressor: Compressor, count: int = 6, world: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """The means and the residuals of rank 0 over some steps."""
    group = Group(compressor, world)
    means, residuals = [], []
    for _ in range(count):
        means.append(group.aggregate(group.gradients())[0].mean.clone())
        residuals.append(group.states[0][RESIDUAL].flat.clone())
    return means, residuals


def test_one_step_of_a_decaying_residual_by_hand() -> None:
    """SparseLoCo, equations 1.2 to 1.4: a = beta e + d, q = top 2 of a, e' = a - q."""
    group = Group(Feedback(HALF, decay=0.95), 1, layout=FOUR)
    group.states[0][RESIDUAL].flat.copy_(torch.tensor([0.4, -0.2, 0.0, 0.1], dtype=torch.float64))
    (staged,) = group.aggregate([torch.tensor([1.0, -3.0, 0.5, 0.2], dtype=torch.float64)])
    torch.testing.assert_close(staged.mean, torch.tensor([1.38, -3.19, 0.0, 0.0], dtype=torch.float64))
    left = group.states[0][RESIDUAL].flat
    torch.testing.assert_close(left, torch.tensor([0.0, 0.0, 0.5, 0.295], dtype=torch.float64))


@pytest.mark.parametrize("inner", [TopK(density=0.1), Chain(TopK(density=0.1), Int8()), SparseSum(TopK(density=0.1))])
def test_a_decay_of_one_is_feedback_without_decay_bit_for_bit(inner: Compressor) -> None:
    plain, whole = steps(Feedback(inner)), steps(Feedback(inner, decay=1.0))
    for ours, theirs in zip(plain, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    faded = steps(Feedback(inner, decay=0.95))
    assert not any(torch.equal(a, b) for a, b in zip(plain[0][1:], faded[0][1:], strict=True))


def test_a_decay_of_zero_forgets_every_loss() -> None:
    forgetful, stateless = steps(Feedback(HALF, decay=0.0))[0], Group(HALF, 3)
    for mean in forgetful:
        assert torch.equal(mean, stateless.aggregate(stateless.gradients())[0].mean)


def test_a_residual_without_news_decays_by_the_same_share_in_each_step() -> None:
    group = Group(Feedback(TopK(density=0.25), decay=0.5), 1, layout=FOUR)
    group.states[0][RESIDUAL].flat.copy_(torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64))
    sent = [group.aggregate([torch.zeros(4, dtype=torch.float64)])[0].mean.max().item() for _ in range(4)]
    assert sent == [4.0, 1.0, 0.25, 0.0625]


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan")])
def test_feedback_rejects_a_decay_that_is_no_share(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\].*Write Feedback"):
        Feedback(Dense(), decay=decay)


def test_ef21_rejects_a_decay() -> None:
    with pytest.raises(ValueError, match=r"decay=0.9 shrinks a residual.*Write Feedback\(Int8\(\), decay=0.9\)"):
        Feedback(Int8(), rule="ef21", decay=0.9)


def test_a_decay_is_read_from_text() -> None:
    (term,) = parse("Feedback(TopK(0.5), decay=0.95)").terms
    assert term == Feedback(HALF, decay=0.95)
    assert repr(term) == "Feedback(TopK(density=0.5), decay=0.95)"


def narrow(inner: Compressor, decay: float = 1.0) -> Group:
    return Group(Feedback(inner, decay=decay, dtype="bfloat16"), 3, dtype=torch.float32)


def test_a_narrow_residual_of_a_compressor_that_sends_everything_stays_zero() -> None:
    group, plain = narrow(Dense()), Group(Dense(), 3, dtype=torch.float32)
    for _ in range(4):
        assert torch.equal(group.aggregate(group.gradients())[0].mean, plain.aggregate(plain.gradients())[0].mean)
        assert all(not state[RESIDUAL].flat.any() for state in group.states)


WIDENING = [TopK(density=0.1), Int8(block=16), Chain(TopK(density=0.1), Int8()), Sharded(Int8(block=16))]
WIDENED = [PowerSGD(rank=1), Threshold(0.5, 0.1)]  # by feedback, as a whole


@pytest.mark.parametrize("inner", [*WIDENING, *WIDENED], ids=repr)
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_a_narrow_residual_is_the_unsent_part_rounded_once_per_step(inner: Compressor, decay: float) -> None:
    """Each step is one of feedback in float32 from the rounded residual."""
    group, wide = narrow(inner, decay), Group(Feedback(inner, decay=decay), 3, dtype=torch.float32)
    for _ in range(5):
        for ours, theirs in zip(group.states, wide.states, strict=True):
            for key in filter(is_unsent, ours):
                theirs[key].flat.copy_(ours[key].flat)
        gradients = group.gradients()
        staged, expected = group.aggregate(gradients), wide.aggregate(gradients)
        for rank in range(3):
            assert torch.equal(staged[rank].mean, expected[rank].mean)
            assert torch.equal(staged[rank].own, expected[rank].own)
            for key in filter(is_unsent, group.states[rank]):
                left = group.states[rank][key].flat
                assert left.dtype == torch.bfloat16
                assert torch.equal(left, wide.states[rank][key].flat.bfloat16())


def test_a_narrow_residual_loses_at_most_its_rounding_errors() -> None:
    group = narrow(TopK(density=0.1))
    debt, allowed = torch.zeros(group.layout.numel), torch.zeros(group.layout.numel)
    for _ in range(20):
        gradients = group.gradients()
        sent = group.aggregate(gradients)[0].own
        debt += gradients[0] - sent
        allowed += 2**-8 * group.states[0][RESIDUAL].flat.abs() + 2**-20 * (gradients[0].abs() + debt.abs())
    lost = (debt - group.states[0][RESIDUAL].flat).abs()
    assert (lost <= allowed).all()
    assert lost.max() > 1e-3  # some of them add up


def test_a_narrow_residual_has_half_the_bytes_and_float64_keeps_its_own() -> None:
    each = Feedback(HALF, dtype="bfloat16")
    kept = [Group(each, 1, dtype=dtype).states[0][RESIDUAL].flat for dtype in (torch.float32, torch.float64)]
    assert [residual.dtype for residual in kept] == [torch.bfloat16, torch.float64]
    assert kept[0].nbytes * 2 == Group(Feedback(HALF), 1, dtype=torch.float32).states[0][RESIDUAL].flat.nbytes
    assert kept[0].nbytes == narrow(HALF).states[0].scratch(RESIDUAL).flat.nbytes


@pytest.mark.parametrize("recipe", ["EveryStep() + {}", "LocalSGD(4) + {}"])
@pytest.mark.parametrize("inner", ["TopK(0.2)", "Sharded(Int8(block=16))"])
def test_training_resumes_with_a_narrow_residual_bit_for_bit(recipe: str, inner: str) -> None:
    check_resume(recipe.format(f"Feedback({inner}, dtype='bfloat16')"), [5])


def test_feedback_rejects_other_types_of_residuals() -> None:
    with pytest.raises(ValueError, match=r"dtype must be 'bfloat16' or None, got 'float16'.*Write Feedback"):
        Feedback(Int8(), dtype="float16")
    with pytest.raises(ValueError, match=r"dtype='bfloat16' is for a residual.*Write Feedback"):
        Feedback(Int8(), rule="ef21", dtype="bfloat16")
    (term,) = parse("Feedback(TopK(0.5), dtype='bfloat16')").terms
    assert repr(term) == "Feedback(TopK(density=0.5), dtype='bfloat16')"
