"""Auto in the grammar: alone, in Python and as text, with a recipe to begin with."""

import pytest

from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.recipe import Recipe, automatic, resolve
from gossamer.algorithms.strategies import LocalSGD
from gossamer.errors import RecipeError


@pytest.mark.parametrize("written", ["auto", " auto ", "Auto()", "Auto(most_steps=3.0)", Auto()])
def test_it_is_written_in_python_and_as_text(written: str | Auto) -> None:
    assert automatic(written) == Auto()
    assert resolve(written, 4) == Recipe()


def test_its_repr_builds_it_again() -> None:
    auto = Auto(most_steps=1.1, local_steps=False, steps=20_000)
    assert automatic(repr(auto)) == auto
    assert automatic("Auto(1.1)") == Auto(most_steps=1.1)


@pytest.mark.parametrize("written", [None, "Int8()", "home", Recipe(), "LocalSGD(period=8) + Float4()"])
def test_a_recipe_that_stays_is_none(written: str | Recipe | None) -> None:
    assert automatic(written) is None


@pytest.mark.parametrize("written", ["auto + Int8()", "LocalSGD(period=8) + Auto()", LocalSGD(period=8) + Auto()])
def test_it_is_no_part_of_a_recipe(written: str) -> None:
    with pytest.raises(RecipeError, match="Write auto alone"):
        resolve(written)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("Auto(0.5)", "1 or more"),
        ("Auto(local_steps=1)", "True or False"),
        ("Auto(steps=0)", r"Write Auto\(steps=20000\)"),
        ("Auot", "Write one of: Auto"),
        ("Chain(auto, Int8())", "no auto"),
    ],
)
def test_mistakes_are_named(written: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        resolve(written)
