"""Federation: the terms that a server and all devices of a federation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.errors import RecipeError, require
from gossamer.federated.messages import Scalar


class RecipeTerms(NamedTuple):
    """The parts of a federated recipe."""

    recipe: Recipe  # resolved
    strategy: FederatedStrategy
    compressor: Compressor  # of contributions
    pull: Compressor | None  # of differences between versions


def recipe_terms(written: str | Recipe) -> RecipeTerms:
    """Resolve a federated recipe. Raises RecipeError for other recipes."""
    recipe = resolve(written)
    strategy = recipe.strategy
    if not isinstance(strategy, FederatedStrategy):
        raise RecipeError(
            f"{written} trains all workers in lockstep, but a federation has devices that join and leave. Begin its "
            "recipe with a federated strategy, such as FedAvg(fraction=0.1)."
        )
    return RecipeTerms(recipe, strategy, recipe.compressor, strategy.pull_compressor)


Config = Mapping[str, Scalar]
RoundConfig = Config | Callable[[int], Config]


def config_by_round(config: RoundConfig | None) -> Callable[[int], dict[str, Scalar]] | None:
    """The configuration as a function of a round's index, from 0; None without configuration. Raises ValueError."""
    if callable(config):
        return lambda index: _checked(config(index))
    if not config:
        return None
    same = _checked(config)
    return lambda index: same


def _checked(config: Config) -> dict[str, Scalar]:
    for key, value in config.items():
        require(
            isinstance(key, str) and (value is None or type(value) in (bool, int, float, str)),
            f"a round's config must have numbers, booleans and texts by name, but {key!r} is {value!r}, which cannot "
            f"be sent to devices: write float(...) or str(...) of it",
        )
    return dict(config)
