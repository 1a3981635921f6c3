"""Elastic recipes: tell which recipes can go on with another number of workers, and why others cannot."""

from __future__ import annotations

from gossamer.algorithms.compressors.hierarchical import Hierarchical
from gossamer.algorithms.compressors.sharded import Sharded
from gossamer.algorithms.compressors.sparse_allreduce import SparseSum
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GossipStage, ServerStage, SilentStage
from gossamer.algorithms.topologies import Hierarchy
from gossamer.errors import AttachError


def refuse_inelastic(recipe: Recipe) -> None:
    """Raise AttachError for a recipe whose workers cannot come and go in lock step."""
    for stage in recipe.strategy.stages:
        if isinstance(stage, GossipStage):
            raise _refusal(
                recipe,
                "neighbors hold different parameters, and there is none from which all could go on",
                "A fixed run of Gossip('pairwise') outlives losses as it is: gossamer run --workers 4 --recipe "
                "\"Gossip('pairwise')\"",
            )
        if isinstance(stage, SilentStage):
            raise _refusal(
                recipe, "its workers agree on no parameters, from which a newcomer could go on", "Write Dense()"
            )
        if isinstance(stage, ServerStage):
            raise _refusal(
                recipe,
                "its workers do not move in step, and outlive losses without it",
                "Write gossamer run --workers 4 --servers 1",
            )
        if stage.per_site is not None:
            raise _refusal(recipe, "sites would change with every worker that comes or goes", "Leave out per_site")
    for term in recipe.compressor.held():
        if isinstance(term, Sharded | SparseSum | Hierarchical):
            raise _refusal(
                recipe,
                f"with {type(term).__name__} each worker keeps what the group owes itself for a part of the tensors, "
                "and parts would move with every worker that comes or goes",
                f"Leave out {type(term).__name__}",
            )
    if isinstance(recipe.topology, Hierarchy):
        raise _refusal(recipe, "nodes would change with every worker that comes or goes", "Leave out Hierarchy")


def _refusal(recipe: Recipe, why: str, instead: str) -> AttachError:
    return AttachError(
        f"an elastic run cannot have the recipe {recipe!r}: {why}. {instead}; or run a fixed number of workers: "
        "gossamer run --workers 4."
    )
