"""Compressors that do a part of the optimizer's work: what may stand around them, and what a recipe adds."""

from __future__ import annotations

import pytest

from gossamer.compressors.momentum_wrapper import MomentumWrapper
from gossamer.errors import RecipeError
from gossamer.recipes.recipe import resolve

TERMS = ["AdamUpdate(OneBit())", "CompressedAdam(OneBit())", "OneBitAdam(inner=OneBit())", "MicroAdam(OneBit())"]
ALL = [*TERMS, "DeMo()"]


def check_nothing_stands_around_it(term: str) -> None:
    with pytest.raises(RecipeError, match="around it would come in between"):
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
