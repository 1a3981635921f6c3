from __future__ import annotations

from fractions import Fraction
from math import inf, isnan
from statistics import fmean

import pytest
import torch

from gossamer.base.bounded_mean import mean_of, tensor_mean

LARGEST = torch.finfo(torch.float64).max


@pytest.mark.parametrize(
    "values", [[1e308] * 2, [LARGEST] * 3, [1e308, 1e308, -1e308, -1e308], [1e308, 1.7e308, 5.0], [-LARGEST] * 1000]
)
def test_the_mean_of_finite_numbers_is_finite_and_exact(values: list[float]) -> None:
    exact = sum(map(Fraction, values)) / len(values)
    assert mean_of(values) == pytest.approx(float(exact), rel=1e-15)
    found = tensor_mean(torch.tensor(values, dtype=torch.float64)[:, None])
    assert float(found) == pytest.approx(float(exact), rel=1e-12)


def test_ordinary_numbers_have_the_mean_of_a_plain_sum() -> None:
    values = [0.1, 2.5, -3e10, 5e-324]
    assert mean_of(values) == fmean(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(tensor_mean(tensor), tensor.mean(0))


def test_infinite_numbers_have_no_finite_mean() -> None:
    assert mean_of([1.0, inf]) == inf
    assert isnan(mean_of([-inf, inf]))
    assert isnan(mean_of([float("nan"), 1e308, 1e308]))
    assert tensor_mean(torch.tensor([1e308, inf], dtype=torch.float64)) == inf


def test_each_entry_of_a_tensor_has_a_mean_of_its_own() -> None:
    """An entry whose sum overflows stands between an infinite and a tiny one."""
    stacked = torch.tensor([[1e308, inf, 5e-324], [1e308, 0.0, 5e-324]], dtype=torch.float64)
    assert tensor_mean(stacked).tolist() == [1e308, inf, 5e-324]


def test_a_complex_mean_does_not_overflow() -> None:
    value = complex(1e308, -1e308)
    assert complex(tensor_mean(torch.tensor([value, value], dtype=torch.complex128))) == pytest.approx(value)
