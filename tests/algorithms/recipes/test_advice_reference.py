"""Recipes from an advice: read where a user wrote them, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.algorithms.recipes import parse
from gossamer.algorithms.recipes.advice_reference import read_recipe
from gossamer.errors import RecipeError


def _written(folder: Path, content: object) -> str:
    file = folder / "advice.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"@{file}"


def test_the_chosen_recipe_is_read(tmp_path: Path) -> None:
    assert read_recipe(_written(tmp_path, {"advice_version": 1, "recipe": "Int8()"})) == "Int8()"


def test_other_texts_stay() -> None:
    assert read_recipe("TopK(density=0.01)") == "TopK(density=0.01)"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "[" * 100_000,
        "[]",
        {"recipe": "Int8()"},
        {"advice_version": 1},
        {"advice_version": 1, "recipe": 7},
        {"advice_version": 1, "recipe": ""},
        {"advice_version": 1, "recipe": "@other.json"},
        {"advice_version": 1, "recipe": "Int8()" * 10_000},
    ],
)
def test_an_invalid_advice_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(RecipeError, match="gossamer advise") as refusal:
        read_recipe(_written(tmp_path, content))
    assert len(str(refusal.value)) < 400


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.json does not exist"):
        read_recipe("@nowhere.json")


def test_a_secret_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refusal:
        read_recipe(_written(tmp_path, "password"))
    assert "password" not in str(refusal.value)


def test_texts_from_elsewhere_open_no_file(tmp_path: Path) -> None:
    """A recipe that a peer or a checkpoint names goes to `parse`, which knows no files."""
    with pytest.raises(RecipeError):
        parse(_written(tmp_path, {"advice_version": 1, "recipe": "Int8()"}))
