"""Recipe choice: prefers the command line's recipe to the script's; compressors alone; recipes of elastic runs."""

from __future__ import annotations

import os
from dataclasses import replace

from gossamer import events
from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.hierarchical import Hierarchical
from gossamer.algorithms.compressors.sharded import Sharded
from gossamer.algorithms.compressors.sparse_allreduce import SparseSum
from gossamer.algorithms.recipes.advice_reference import read_recipe
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.recipes.validation import check_argument
from gossamer.algorithms.strategies import EveryStep, GossipStage, ServerStage, SilentStage
from gossamer.algorithms.strategies.global_batch import micro_batches
from gossamer.algorithms.topologies import Hierarchy
from gossamer.base.term import Term, Terms
from gossamer.errors import AttachError, RecipeError
from gossamer.train.world_state import WorldState

Written = Recipe | Terms | Term | str | None


def chosen_recipe(recipe: Written, world: WorldState) -> Written:
    """The command line's recipe, if any; otherwise the script's. @FILE names the recipe of an advice."""
    recipe = read_recipe(recipe) if isinstance(recipe, str) else recipe
    override = os.environ.get("GOSSAMER_RECIPE")
    if override is None:
        return recipe
    override = read_recipe(override)
    replaces = recipe is not None and resolve(recipe, world.size) != resolve(override, world.size)
    if replaces and world.is_first:  # one notice per job
        events.notice(f"the command line's recipe, {override}, replaces the script's, {recipe}")
    return override


def compressor_alone(recipe: Written, world: WorldState, caller: str) -> Compressor:
    """A recipe's compressor for `caller`, which averages its arguments at once.

    Raises RecipeError if the recipe has a strategy or a topology, which would be ignored.
    """
    resolved = resolve(recipe, world.size)
    plain = Recipe(compressor=resolved.compressor)
    dropped = [repr(term) for term in resolved.terms if term not in plain.terms]
    if dropped:
        raise RecipeError(
            f"gossamer.{caller} averages its arguments at once, among all workers, so {' and '.join(dropped)} of "
            f"{recipe} would be ignored. Pass a compressor alone, such as "
            f"gossamer.{caller}(..., {str(resolved.compressor)!r}), or train, without DDP, by "
            f"gossamer.attach(model, optimizer, {str(recipe)!r})."
        )
    return resolved.compressor


# -- attach's global_batch and batch -----------------------------------------------------------------------------------


def with_global_batch(recipe: Recipe, global_batch: int | None, batch: int | None) -> Recipe:
    """The recipe with this number of samples per step; unchanged if neither number is given.

    Raises RecipeError for invalid numbers, and AttachError for numbers that do not divide, or another strategy.
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
            f"global_batch={global_batch} and batch={batch} are arguments of EveryStep(), but this recipe's strategy "
            f"is {strategy!r}. Write "
            f'gossamer.attach(model, optimizer, "{recipe.compressor!r}", global_batch={global_batch}, batch={batch}), '
            f"or leave out global_batch and batch."
        )
    return replace(recipe, strategy=wanted)


def refuse_small_batch(recipe: Recipe, workers: int) -> None:
    """Raise AttachError if `workers`, the maximum number, are too many for one step's passes."""
    strategy = recipe.strategy
    if isinstance(strategy, EveryStep) and strategy.global_batch is not None and strategy.batch is not None:
        try:
            micro_batches(strategy.global_batch, strategy.batch, workers)
        except ValueError as error:
            raise AttachError(f"{error} In an elastic run those are the MAX of --workers MIN:MAX.") from None


# -- elastic runs ------------------------------------------------------------------------------------------------------


def refuse_inelastic(recipe: Recipe) -> None:
    """Raise AttachError for a recipe that does not support workers joining or leaving."""
    for stage in recipe.strategy.stages:
        if isinstance(stage, GossipStage):
            raise _refusal(
                recipe,
                "neighbors hold different parameters, and there is no common state for new workers",
                "A fixed run of Gossip('pairwise') tolerates losses itself: gossamer run --workers 4 --recipe "
                "\"Gossip('pairwise')\"",
            )
        if isinstance(stage, SilentStage):
            raise _refusal(recipe, "its workers have no common parameters for new workers", "Write Dense()")
        if isinstance(stage, ServerStage):
            raise _refusal(
                recipe,
                "its workers are not in lock step, and tolerate losses without an elastic run",
                "Write gossamer run --workers 4 --servers 1",
            )
        if stage.per_site is not None:
            raise _refusal(recipe, "sites would change with every worker that joins or leaves", "Leave out per_site")
    for term in recipe.compressor.held():
        if isinstance(term, Sharded | SparseSum | Hierarchical):
            raise _refusal(
                recipe,
                f"with {type(term).__name__} each worker keeps undelivered values for a part of the tensors, and parts "
                "would move with every worker that joins or leaves",
                f"Leave out {type(term).__name__}",
            )
    if isinstance(recipe.topology, Hierarchy):
        raise _refusal(recipe, "nodes would change with every worker that joins or leaves", "Leave out Hierarchy")


def _refusal(recipe: Recipe, why: str, instead: str) -> AttachError:
    return AttachError(
        f"an elastic run cannot have the recipe {recipe!r}: {why}. {instead}; or run a fixed number of workers: "
        "gossamer run --workers 4."
    )
