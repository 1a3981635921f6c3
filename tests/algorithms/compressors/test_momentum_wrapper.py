"""Compressors that do a part of the optimizer's work: what may stand around them, and what a recipe adds."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from laws.laws import LAYOUT, Group, close
from torch import Tensor

from gossamer.algorithms.compressors import AdamUpdate, Dense, MicroAdam
from gossamer.algorithms.compressors.momentum_wrapper import MomentumWrapper
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.errors import RecipeError

TERMS = ["AdamUpdate(OneBit())", "CompressedAdam(OneBit())", "OneBitAdam(inner=OneBit())", "MicroAdam(OneBit())"]
ALL = [*TERMS, "DeMo()"]


class UnderAdam(Group):
    """A group whose optimizer is Adam."""

    def at(self, rank: int) -> AggregationContext:
        return replace(super().at(rank), momentum=0.8, second_beta=0.9, epsilon=1e-6)


def check_nothing_stands_around_it(term: str) -> None:
    with pytest.raises(RecipeError, match="may be around it"):
        resolve(f"Hierarchical({term}, per_node=2)", 4)
    assert "Route(" in repr(resolve(term))


@pytest.mark.parametrize("term", ALL)
def test_nothing_but_route_stands_around_it(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_stands_around_it(term)
    monkeypatch.setattr(MomentumWrapper, "must_be_outermost", False)
    with pytest.raises(pytest.fail.Exception):
        check_nothing_stands_around_it(term)


@pytest.mark.parametrize("term", TERMS)
def test_what_a_recipe_adds_it_adds_within(term: str) -> None:
    found = resolve(term).compressor
    (wrapper,) = (each for each in found.held() if isinstance(each, MomentumWrapper))
    assert "Feedback(" in repr(wrapper.inner)


@pytest.mark.parametrize("term", ALL)
def test_a_clip_that_cuts_everything_is_refused_by_name(term: str) -> None:
    name, _, rest = term.partition("(")
    with pytest.raises(ValueError, match=rf"Write {name}\(clip=1\.0\)"):
        resolve(f"{name}({rest[:-1]}{', ' if rest != ')' else ''}clip=0.0)")


def limited(x: Tensor, limit: float) -> Tensor:
    """Each tensor scaled down to a norm of at most `limit`."""
    spans = [slot.flat_view(x) for slot in LAYOUT]
    return torch.cat([span * min(1.0, limit / float(span.norm())) for span in spans])


@pytest.mark.parametrize("kind", [AdamUpdate, MicroAdam])
def test_clip_limits_each_tensors_gradient_before_it_is_used(kind: type[AdamUpdate] | type[MicroAdam]) -> None:
    clipping, plain = UnderAdam(kind(inner=Dense(), clip=0.5), 2), UnderAdam(kind(inner=Dense()), 2)
    for scale in (0.1, 1.0, 100.0):
        gradients = [scale * x for x in clipping.gradients()]
        expected = plain.aggregate([limited(x, 0.5 * sqrt(2)) for x in gradients])
        close(clipping.aggregate(gradients)[0].mean, expected[0].mean, 1e-12)
