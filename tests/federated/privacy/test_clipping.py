"""Clipping: one norm for all tensors of a contribution, whatever numbers they hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer.errors import NotFinite
from gossamer.federated.privacy.mechanisms import clip_factor, clipped, common_norm


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
def test_what_is_not_finite_is_refused(number: float) -> None:
    assert min(1.0, float("nan")) == 1.0  # how it would pass
    with pytest.raises(NotFinite, match="not finite"):
        clipped((torch.ones(3), torch.tensor([0.0, number])), 1.0)


def test_integers_are_clipped_as_numbers() -> None:
    assert clipped((torch.tensor([3, 4]),), 1.0)[0].tolist() == pytest.approx([0.6, 0.8])
