"""A shard from the text that describes it."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.compressors import Compressor, Route
from gossamer.core.ops import Payload
from gossamer.errors import MalformedError, RecipeError
from gossamer.parameter_server.shard import ServerShard
from gossamer.parameter_server.shard_spec import ShardSpec
from gossamer.parameter_server.update_policy import UpdatePolicy, policy_of
from gossamer.recipes.recipe import Recipe, resolve
from gossamer.strategies.parameter_server import ParameterServer


def shard_of(text: str, values: Payload) -> ServerShard:
    """A shard by its description and first parameters. Raises MalformedError."""
    description = ShardSpec.of_text(text)
    try:
        ways = push_pull_codecs(resolve(description.recipe))
    except RecipeError as error:
        raise MalformedError(f"a shard was described by a recipe that no server can follow: {error}") from error
    try:
        return ServerShard(description, values, ways.push, ways.pull)
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


def policy_for(shard: ServerShard) -> UpdatePolicy:
    """The rule that its recipe asks for."""
    return policy_of(push_pull_codecs(resolve(shard.description.recipe)).strategy)


class PushPullCodecs(NamedTuple):
    """push: completed, with feedback where it is biased; pull: of differences; None sends parameters as they are."""

    strategy: ParameterServer
    push: Compressor
    pull: Compressor | None


def push_pull_codecs(recipe: Recipe) -> PushPullCodecs:
    """How a resolved recipe with a ParameterServer talks. Raises RecipeError for any other."""
    strategy = recipe.strategy
    if not isinstance(strategy, ParameterServer):
        raise RecipeError(f"{recipe} needs no servers. Write ParameterServer() + {recipe.compressor!r}.")
    push = recipe.compressor if strategy.push is None else resolve(strategy.push).compressor
    pull = strategy.pull
    return PushPullCodecs(strategy, push, pull if pull is None or pull.handles_every_shape else Route(pull))
