"""Advice reference: reads the recipe of `@advice.json` from a file that `gossamer advise --json` wrote."""

from __future__ import annotations

from pathlib import Path

from gossamer.algorithms.recipes.validation import LONGEST_TEXT
from gossamer.base import bounded_file
from gossamer.base.json_text import read_json
from gossamer.errors import RecipeError

MARK = "@"
WRITE = "Make one: gossamer advise --network SPEC --json advice.json SCRIPT"


def read_recipe(text: str) -> str:
    """Return a recipe's text, or after an @ the recipe chosen in the advice file. Raises RecipeError.

    Use it for texts from users only: file names from other sources must not be opened.
    """
    return _advised(Path(text.strip()[len(MARK) :])) if text.strip().startswith(MARK) else text


def _advised(file: Path) -> str:
    try:
        advice = read_json(bounded_file.read_bytes(file))
    except FileNotFoundError:
        raise RecipeError(f"the advice file {file} does not exist. {WRITE}") from None
    except (OSError, ValueError) as problem:
        raise RecipeError(f"{file} cannot be read as an advice file: {type(problem).__name__}. {WRITE}") from None
    recipe = advice.get("recipe") if isinstance(advice, dict) and "advice_version" in advice else None
    if not isinstance(recipe, str) or not recipe or recipe.startswith(MARK) or len(recipe) > LONGEST_TEXT:
        raise RecipeError(f"{file} is not an advice file: it has no recipe as `gossamer advise` writes it. {WRITE}")
    return recipe
