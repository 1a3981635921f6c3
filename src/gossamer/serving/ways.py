"""By what gradients travel to the servers, and parameters back."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.compressors import Compressor, Route
from gossamer.errors import RecipeError
from gossamer.recipes.recipe import Recipe, resolve
from gossamer.strategies.parameter_server import ParameterServer


class Ways(NamedTuple):
    """push: completed, with feedback where it is biased; pull: of differences; None sends parameters as they are."""

    strategy: ParameterServer
    push: Compressor
    pull: Compressor | None


def ways_of(recipe: Recipe) -> Ways:
    """How a resolved recipe with a ParameterServer talks. Raises RecipeError for any other."""
    strategy = recipe.strategy
    if not isinstance(strategy, ParameterServer):
        raise RecipeError(f"{recipe} needs no servers. Write ParameterServer() + {recipe.compressor!r}.")
    push = recipe.compressor if strategy.push is None else resolve(strategy.push).compressor
    pull = strategy.pull
    return Ways(strategy, push, pull if pull is None or pull.routes else Route(pull))
