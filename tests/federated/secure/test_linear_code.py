"""Linear codes: what is read of a sum is the sum of what is read, and others are refused with the reason."""

from __future__ import annotations

import pytest
import torch
from support.simulated_peers import expect_noticed

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
from gossamer.algorithms.strategies.federated import SecureAggregation
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import Layout
from gossamer.errors import RecipeError
from gossamer.federated.secure_aggregation import fixed_point as codes
from gossamer.federated.secure_aggregation.fixed_point import linear_code

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
        ("TopK(0.01)", "places of its own.*Write RandomK"),
        ("Int8()", r"scales of its own.*SecureAggregation\(bits=8\)"),
        ("Chain(TopK(0.01), Int8())", "places of its own.*RandomK"),
        ("PowerSGD(2)", r"second round of masks. Write RandomProjection\(rank=2\)"),
        ("Dense('float16')", r"Leave Dense\(dtype='float16'\) out"),
        ("Route(RandomK(0.1), rest=Int8())", "scales of its own"),
        ("Rotated(TernGrad(), by='hadamard')", "do not add up"),
    ],
)
def test_other_compressors_are_refused_with_the_reason(text: str, why: str) -> None:
    compressor = resolve(f"EveryStep() + {text}").compressor
    with pytest.raises(RecipeError, match=why):
        linear_code(compressor, SecureAggregation())
