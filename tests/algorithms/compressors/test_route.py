"""Route: which compressor each tensor takes."""

from __future__ import annotations

import pytest
import torch

from gossamer.algorithms.compressors import Dense, PowerSGD, Route, TopK
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import price

LAYOUT = Layout.of(
    {
        "encoder.embedding.weight": (100, 8),
        "encoder.layers.0.weight": (30, 20),
        "encoder.layers.0.bias": (30,),
        "encoder.norm.weight": (900,),
        "head.weight": (9, 9),
        "head.thin": (400, 2),
    }
)


def dense(route: Route) -> set[str]:
    """The last parts of the names that take the other way."""
    return {slot.name.removeprefix("encoder.") for slot in LAYOUT if route.group(slot) == 1}


@pytest.mark.parametrize(
    ("route", "rest"),
    [
        (Route(TopK(density=0.1)), {"layers.0.bias", "norm.weight", "head.weight"}),
        (Route(TopK(density=0.1), smallest=0), {"layers.0.bias", "norm.weight"}),
        (Route(PowerSGD(rank=2)), {"layers.0.bias", "norm.weight", "head.weight", "head.thin"}),
        (
            Route(TopK(density=0.1), names="*.embedding.*"),
            {"embedding.weight", "layers.0.bias", "norm.weight", "head.weight"},
        ),
        (
            Route(TopK(density=0.1), smallest=0, names="head.*"),
            {"layers.0.bias", "norm.weight", "head.weight", "head.thin"},
        ),
        (Route(TopK(density=0.1), smallest=0, names="*.EMBEDDING.*"), {"layers.0.bias", "norm.weight"}),
        (Route(TopK(density=0.1), smallest=0, names="embedding"), {"layers.0.bias", "norm.weight"}),
        (Route(TopK(density=0.1), smallest=0, names=""), {"layers.0.bias", "norm.weight"}),
        (Route(TopK(density=0.1), names="*"), {slot.name.removeprefix("encoder.") for slot in LAYOUT}),
    ],
    ids=lambda value: ", ".join(sorted(value)) if isinstance(value, set) else repr(value),
)
def test_dimensions_sizes_and_names_decide(route: Route, rest: set[str]) -> None:
    assert dense(route) == rest


def test_names_change_what_travels() -> None:
    packed = FlatTensors(torch.empty(LAYOUT.numel, device="meta"), LAYOUT)

    def ops(route: Route) -> list[str]:
        state = route.init(packed, AggregationContext(world=2))
        return [each.op for each in price(route.aggregate(packed, state, AggregationContext(world=2)), 2)]

    assert ops(Route(TopK(density=0.1))) == ["Gather", "Mean"]
    assert ops(Route(TopK(density=0.1), names="*")) == ["Mean"]


def test_the_pattern_survives_the_text_of_a_recipe() -> None:
    text = "Route(TopK(density=0.1), names='*.embedding.*')"
    (term,) = parse(text).terms
    assert repr(term) == text
    resolved = resolve(text).compressor
    assert isinstance(resolved, Route)
    assert resolved.names == "*.embedding.*"
    assert resolved.rest == Dense()
