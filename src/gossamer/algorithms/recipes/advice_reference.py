"""Advice reference: reads the recipe that `@advice.json` means, from the file that `gossamer advise --json` wrote."""

from __future__ import annotations

from pathlib import Path

from gossamer.algorithms.recipes.validation import LONGEST_TEXT
from gossamer.base import bounded_file
from gossamer.base.json_text import read_json
from gossamer.errors import RecipeError

MARK = "@"
WRITE = "Make one: gossamer advise --network SPEC --json advice.json SCRIPT"


def read_recipe(text: str) -> str:
    """A recipe's text as it is, or the one that the advice in the file after an @ chose. Raises RecipeError.

    For texts that a user wrote only: names of files that come from elsewhere are not to be opened.
    """
    return _advised(Path(text.strip()[len(MARK) :])) if text.strip().startswith(MARK) else text


def _advised(file: Path) -> str:
    try:
        advice = read_json(bounded_file.read_bytes(file))
    except FileNotFoundError:
        raise RecipeError(f"there is no file {file} to take a recipe from. {WRITE}") from None
    except (OSError, ValueError) as problem:
        raise RecipeError(f"{file} cannot be read as an advice: {type(problem).__name__}. {WRITE}") from None
    recipe = advice.get("recipe") if isinstance(advice, dict) and "advice_version" in advice else None
    if not isinstance(recipe, str) or not recipe or recipe.startswith(MARK) or len(recipe) > LONGEST_TEXT:
        raise RecipeError(f"{file} is no advice: it names no recipe as `gossamer advise` does. {WRITE}")
    return recipe
