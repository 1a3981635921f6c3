"""Recipe terms: reads the strategy and the compressors of a federation from its recipe's text."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.compressors import Compressor
from gossamer.errors import RecipeError
from gossamer.recipes.recipe import resolve
from gossamer.strategies.federated import FederatedStrategy


class RecipeTerms(NamedTuple):
    """What a recipe says of a federation."""

    text: str  # of the completed recipe
    strategy: FederatedStrategy
    compressor: Compressor  # of contributions
    pull: Compressor | None  # of differences between versions


def recipe_terms(text: str) -> RecipeTerms:
    """Raises RecipeError."""
    recipe = resolve(text)
    strategy = recipe.strategy
    if not isinstance(strategy, FederatedStrategy):
        raise RecipeError(
            f"{text} trains with all workers in step, and a federation has devices that come and go. Begin its recipe "
            "with a federated strategy, such as FedAvg(fraction=0.1)."
        )
    pull = None if strategy.pull is None else resolve(strategy.pull).compressor
    return RecipeTerms(repr(recipe), strategy, recipe.compressor, pull)
