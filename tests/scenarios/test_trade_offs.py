"""Figures of docs/reference/trade-offs.md equal those of the code and of the pages of measurements; all are present."""

from __future__ import annotations

import re

import pytest
from support.page_figures import COLUMNS, figures, wrong_figures
from support.paths import ROOT

from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.mesh.collective_selector import WISHES

PAGE = (ROOT / "docs" / "reference" / "trade-offs.md").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_figures_are_those_of_the_code_and_of_the_measurements() -> None:
    assert {column for _, column, _ in figures(PAGE)} == set(COLUMNS)
    assert wrong_figures(PAGE) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`Int8()` | 3.9 | 3.9 | 12.78", "`Int8()` | 4.0 | 3.9 | 12.78"),
        ("`TernGrad()` | 9.6 | 1.2", "`TernGrad()` | 9.6 | 9.6"),
        ("`Int8()` | 3.9 | 3.9 | 12.78", "`Int8()` | 3.9 | 3.9 | 36.7"),
        ("2.726 | 3.075", "2.726 | 2.726"),
        ("20 | 20 | 2.074", "20 | 20 | 1.874"),
    ],
)
def test_other_figures_are_noticed(right: str, wrong: str) -> None:
    assert right in PAGE
    assert len(wrong_figures(PAGE.replace(right, wrong, 1))) == 1


def test_every_technique_is_there() -> None:
    named = set(re.findall(r"\b[A-Z]\w+(?=\()", PAGE))
    assert set(NOUNS) - named == set()
    assert {wish.partition("(")[0] for wish in WISHES} - set(re.findall(r"`(\w+)(?:\(s\))?`", PAGE)) == set()


def test_its_recipes_are_real() -> None:
    for recipe, _, _ in figures(PAGE):
        resolve(recipe)
