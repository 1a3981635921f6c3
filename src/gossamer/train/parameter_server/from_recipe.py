"""Shards from recipes: the codecs, the shard and the update policy for a recipe with servers."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.algorithms.compressors import Compressor, Route
from gossamer.algorithms.recipes.parser import UnknownTerm
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.recipes.registry import unknown_to_servers
from gossamer.algorithms.strategies.base import ServerStrategy
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError, RecipeError
from gossamer.train.parameter_server.shard import ServerShard
from gossamer.train.parameter_server.shard_spec import ShardSpec
from gossamer.train.parameter_server.update_policy import UpdatePolicy, policy_of


class PushPullCodecs(NamedTuple):
    """The strategy of a recipe and the compressors of both directions."""

    strategy: ServerStrategy
    push: Compressor  # of gradients; supports every shape, with error feedback if it is biased
    pull: Compressor | None  # of parameter deltas; None sends parameters uncompressed


def push_pull_codecs(recipe: Recipe) -> PushPullCodecs:
    """The codecs of workers and servers for a resolved recipe. Raises RecipeError without servers."""
    strategy = recipe.strategy
    if not isinstance(strategy, ServerStrategy):
        raise RecipeError(f"{recipe} uses no servers. Write ParameterServer() + {recipe.compressor!r}.")
    push = recipe.compressor if strategy.push is None else resolve(strategy.push).compressor
    pull = strategy.pull
    return PushPullCodecs(strategy, push, pull if pull is None or pull.handles_every_shape else Route(pull))


def make_shard(spec_json: str, values: Payload) -> ServerShard:
    """A shard from its spec and initial parameters. Raises MalformedError."""
    spec = ShardSpec.from_json(spec_json)
    try:
        codecs = push_pull_codecs(resolve(spec.recipe))
    except UnknownTerm as error:
        raise MalformedError(unknown_to_servers(error.name)) from error
    except RecipeError as error:
        raise MalformedError(f"a shard was described by a recipe that servers do not support: {error}") from error
    try:
        return ServerShard(spec, values, codecs.push, codecs.pull)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:  # invalid optimizer settings
        raise MalformedError(f"a shard with {spec.optimizer} and {spec.groups} cannot be created: {error}") from error


def policy_for(shard: ServerShard) -> UpdatePolicy:
    """The update policy of the shard's recipe."""
    return policy_of(push_pull_codecs(resolve(shard.spec.recipe)).strategy)
