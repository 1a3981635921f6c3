"""Recipe choice: takes the command line's recipe before the script's, or a compressor where nothing else is asked."""

from __future__ import annotations

import os

from gossamer import events
from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.advice_reference import read_recipe
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.base.term import Term, Terms
from gossamer.errors import RecipeError
from gossamer.train.world_state import WorldState

Written = Recipe | Terms | Term | str | None


def chosen_recipe(recipe: Written, world: WorldState) -> Written:
    """The command line's recipe where there is one: it beats the script's. @FILE: the one of an advice."""
    recipe = read_recipe(recipe) if isinstance(recipe, str) else recipe
    override = os.environ.get("GOSSAMER_RECIPE")
    if override is None:
        return recipe
    override = read_recipe(override)
    replaces = recipe is not None and resolve(recipe, world.size) != resolve(override, world.size)
    if replaces and world.is_first:  # once a job, whoever launched it
        events.notice(f"the command line's recipe, {override}, replaces the script's, {recipe}")
    return override


def compressor_alone(recipe: Written, world: WorldState, caller: str) -> Compressor:
    """A recipe's compressor for `caller`, which averages whatever it is given at once.

    Raises RecipeError where the recipe has a strategy or a topology, which would be dropped.
    """
    resolved = resolve(recipe, world.size)
    plain = Recipe(compressor=resolved.compressor)
    dropped = [repr(term) for term in resolved.terms if term not in plain.terms]
    if dropped:
        raise RecipeError(
            f"gossamer.{caller} averages what it is given at once, among all workers, so {' and '.join(dropped)} of "
            f"{recipe} would be dropped without a word. Pass a compressor alone, such as "
            f"gossamer.{caller}(..., {str(resolved.compressor)!r}), or train, without DDP, by "
            f"gossamer.attach(model, optimizer, {str(recipe)!r})."
        )
    return resolved.compressor
