"""Recipe terms: reads the strategy and the compressors of a federation from its recipe's text."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies.federated import FederatedStrategy
from gossamer.errors import RecipeError


class RecipeTerms(NamedTuple):
    """What a recipe says of a federation."""

    recipe: Recipe  # completed
    strategy: FederatedStrategy
    compressor: Compressor  # of contributions
    pull: Compressor | None  # of differences between versions


def recipe_terms(written: str | Recipe) -> RecipeTerms:
    """Raises RecipeError."""
    recipe = resolve(written)
    strategy = recipe.strategy
    if not isinstance(strategy, FederatedStrategy):
        raise RecipeError(
            f"{written} trains with all workers in step, and a federation has devices that come and go. Begin its "
            "recipe with a federated strategy, such as FedAvg(fraction=0.1)."
        )
    return RecipeTerms(recipe, strategy, recipe.compressor, strategy.pull_compressor)
