"""Layouts: dtype names and the search for the first non-finite tensor."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.base.layout import FlatTensors, dtype_name, dtype_of, first_nonfinite


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_the_first_nonfinite_tensor_is_named(number: float) -> None:
    x = FlatTensors.pack({"weight": torch.ones(2, 3), "bias": torch.ones(3), "scale": torch.ones(1)})
    assert first_nonfinite(x) is None
    x["scale"].fill_(number)
    assert first_nonfinite(x) == "scale"
    x["bias"][1] = number
    assert first_nonfinite(x) == "bias"


def test_a_sum_that_overflows_is_not_a_nonfinite_number() -> None:
    assert first_nonfinite(FlatTensors.pack({"weight": torch.full((4,), 6e4, dtype=torch.float16)})) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_dtypes_have_names(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) == dtype_of(str(dtype)) == dtype
