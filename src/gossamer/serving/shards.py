"""A shard from the text that describes it."""

from __future__ import annotations

from gossamer.core.ops import Payload
from gossamer.errors import MalformedError, RecipeError
from gossamer.recipes.recipe import resolve
from gossamer.serving.description import Description
from gossamer.serving.rules import Rule, rule_of
from gossamer.serving.shard import Shard
from gossamer.serving.ways import ways_of


def shard_of(text: str, values: Payload) -> Shard:
    """A shard by its description and first parameters. Raises MalformedError."""
    description = Description.of_text(text)
    try:
        ways = ways_of(resolve(description.recipe))
    except RecipeError as error:
        raise MalformedError(f"a shard was described by a recipe that no server can follow: {error}") from error
    try:
        return Shard(description, values, ways.push, ways.pull)
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
    ) as error:  # an optimizer's, of its settings
        raise MalformedError(
            f"a shard was described that cannot be made, with {description.optimizer} and {description.groups}: {error}"
        ) from error


def rule_for(shard: Shard) -> Rule:
    """The rule that its recipe asks for."""
    return rule_of(ways_of(resolve(shard.description.recipe)).strategy)
