"""Global batch: attach's `global_batch` and `batch` as a part of the recipe, and workers that are too many for it."""

from __future__ import annotations

from dataclasses import replace

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.recipes.validation import check_argument
from gossamer.algorithms.strategies import EveryStep
from gossamer.algorithms.strategies.global_batch import micro_batches
from gossamer.errors import AttachError


def with_global_batch(recipe: Recipe, global_batch: int | None, batch: int | None) -> Recipe:
    """The recipe whose steps have so many samples; the recipe itself where neither number was given.

    Raises RecipeError for what is no number, and AttachError for numbers that make no steps, or a recipe of others.
    """
    if global_batch is None and batch is None:
        return recipe
    strategy = recipe.strategy
    for name, value in (("global_batch", global_batch), ("batch", batch)):
        check_argument(EveryStep, name, value)
    try:
        wanted = EveryStep(global_batch=global_batch, batch=batch)
    except ValueError as error:
        raise AttachError(f"gossamer.attach(..., global_batch={global_batch}, batch={batch}): {error}") from None
    if strategy not in (EveryStep(), wanted):
        raise AttachError(
            f"global_batch={global_batch} and batch={batch} make steps of EveryStep(), each of so many samples, and "
            f"this recipe's strategy is {strategy!r}, whose workers make steps otherwise. Write "
            f'gossamer.attach(model, optimizer, "{recipe.compressor!r}", global_batch={global_batch}, batch={batch}), '
            f"or leave out global_batch and batch."
        )
    return replace(recipe, strategy=wanted)


def refuse_small_batch(recipe: Recipe, workers: int) -> None:
    """Raise AttachError where so many workers, the most that will be there, cannot all have a part in a step."""
    strategy = recipe.strategy
    if isinstance(strategy, EveryStep) and strategy.global_batch is not None and strategy.batch is not None:
        try:
            micro_batches(strategy.global_batch, strategy.batch, workers)
        except ValueError as error:
            raise AttachError(f"{error} In an elastic run those are the MAX of --workers MIN:MAX.") from None
