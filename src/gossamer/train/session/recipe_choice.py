"""Recipe choice: prefers the command line's recipe to the script's; selects the codec of each worker; compressors
alone; recipes of elastic runs; trainings with few rounds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral

from gossamer import events
from gossamer.algorithms.compressors import Compressor, PerWorker
from gossamer.algorithms.recipes.advice_reference import read_recipe
from gossamer.algorithms.recipes.recipe import Recipe, meaning, resolve
from gossamer.algorithms.recipes.validation import check_argument
from gossamer.algorithms.recipes.wrapping import replace_tables, tables_of
from gossamer.algorithms.strategies import EveryStep
from gossamer.algorithms.strategies.global_batch import micro_batches
from gossamer.base.term import Inelastic, Term, Terms
from gossamer.base.transport import Transport
from gossamer.comm.mesh.link_measurement import Links
from gossamer.errors import AttachError, MismatchError, RecipeError
from gossamer.train.world_state import WorldState

Written = Recipe | Terms | Term | str | None


def chosen_recipe(recipe: Written, world: WorldState) -> Written:
    """The recipe of `gossamer run --recipe`, `gossamer.launch(recipe=)` or GOSSAMER_RECIPE; without them, the script's.
    @FILE names the recipe of an advice."""
    recipe = read_recipe(recipe) if isinstance(recipe, str) else recipe
    override = os.environ.get("GOSSAMER_RECIPE")
    if override is None:
        return recipe
    override = read_recipe(override)
    replaces = recipe is not None and meaning(recipe, world.size) != meaning(override, world.size)
    if replaces and world.is_first:  # one notice per job
        events.notice(
            f"recipe {override}, from --recipe, launch(recipe=...) or GOSSAMER_RECIPE, replaces {recipe} of the script"
        )
    return override


def placed(recipe: Recipe, links: str, hosts: Callable[[], Sequence[str]]) -> Recipe:
    """The recipe with the ranks of slow workers for each PerWorker that selects them by host or bandwidth.

    Args:
        recipe: equal on all ranks.
        links: those of the transport, as text; empty if they were not measured.
        hosts: the host names of all ranks, by rank; called on all ranks if the recipe needs them.

    Raises:
        RecipeError: the bandwidths were not measured.
    """
    terms = [term for table in tables_of(recipe.compressor) for term in table.held() if isinstance(term, PerWorker)]
    if all(term.ranks is not None for term in terms):
        return recipe
    uplinks = Links.of(links).up if links else ()
    names = hosts() if any(term.hosts is not None for term in terms) else ()
    return replace(recipe, compressor=replace_tables(recipe.compressor, lambda term: term.placed(names, uplinks)))


def placed_in(recipe: Recipe, transport: Transport) -> Recipe:
    """`placed` for a new group. Collective call; a notice names the slow workers. A single worker sends nothing."""
    if transport.world == 1:
        return recipe
    found = placed(recipe, transport.links, partial(_hosts, transport))
    if found != recipe and transport.rank == 0:
        events.notice(placed_text(found))
    return found


def placed_text(recipe: Recipe) -> str:
    """A notice about the codec of each worker."""
    tables = tables_of(recipe.compressor)
    chosen = [term.ranks for table in tables for term in table.held() if isinstance(term, PerWorker)]
    unselected = "" if any(chosen) else "; no worker is selected, so all use the first codec"
    return f"each worker's codec: {', '.join(map(repr, tables))}{unselected}"


def _hosts(transport: Transport) -> Sequence[str]:
    texts = transport.all_gather_text(f"{HOST_OF}{socket.gethostname()}")
    if strangers := [rank for rank, text in enumerate(texts) if not text.startswith(HOST_OF)]:
        raise MismatchError(
            f"rank {strangers[0]} has another recipe than rank {transport.rank}, whose PerWorker(hosts=...) needs the "
            "host names of all ranks. Pass the same recipe on every rank."
        )
    return [text.removeprefix(HOST_OF) for text in texts]


HOST_OF = "host of PerWorker: "


def compressor_alone(recipe: Written, world: WorldState, caller: str) -> Compressor:
    """A recipe's compressor for `caller`, which averages its arguments at once.

    Raises RecipeError if the recipe has a strategy or a topology, which would be ignored.
    """
    resolved = resolve(recipe, world.size)
    for table in tables_of(resolved.compressor):
        if not table.is_placed:
            raise RecipeError(
                f"gossamer.{caller} has no session that measures workers, so {table!r} is unknown to it. Name the slow "
                f"workers by rank: gossamer.{caller}(..., {str(replace(table, ranks=0, hosts=None, below=None))!r})."
            )
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


def with_global_batch(recipe: Recipe, global_batch: int | None, batch: int | None, *, balance: bool = False) -> Recipe:
    """The recipe with this number of samples per step; unchanged if none of the arguments is given.

    Raises RecipeError for invalid numbers, and AttachError for numbers that do not divide, or another strategy.
    """
    if global_batch is None and batch is None and not balance:
        return recipe
    strategy = recipe.strategy
    given = {"global_batch": global_batch, "batch": batch, "balance": balance}
    for name, value in given.items():
        check_argument(EveryStep, name, value)
    text = ", ".join(f"{name}={value}" for name, value in given.items() if value not in (None, False))
    try:
        wanted = EveryStep(global_batch=global_batch, batch=batch, balance=balance)
    except ValueError as error:
        raise AttachError(f"gossamer.attach(..., {text}): {error}") from None
    if strategy not in (EveryStep(), wanted):
        raise AttachError(
            f"{text} are arguments of EveryStep(), but this recipe's strategy is {strategy!r}. Write "
            f'gossamer.attach(model, optimizer, "{recipe.compressor!r}", {text}), or leave out {", ".join(given)}.'
        )
    return replace(recipe, strategy=wanted)


def refuse_small_batch(recipe: Recipe, workers: int) -> None:
    """Raise AttachError if `workers`, the maximum number, are too many for one step's passes."""
    strategy = recipe.strategy
    if isinstance(strategy, EveryStep) and strategy.global_batch is not None:
        try:
            micro_batches(strategy.global_batch, strategy.batch or 1, workers)
        except ValueError as error:
            raise AttachError(f"{error} In an elastic run those are the MAX of --workers MIN:MAX.") from None


# -- elastic runs ------------------------------------------------------------------------------------------------------


def refuse_inelastic(recipe: Recipe, sizes: Collection[int] = (), servers: int = 0) -> None:
    """Raise AttachError for a recipe that does not support workers joining or leaving. sizes: possible numbers of
    workers; servers: number of the run's parameter servers."""
    strategy = recipe.strategy
    if servers and not strategy.uses_servers:
        raise AttachError(
            f"this run has servers, which {recipe!r} does not use. Leave out --servers, or write "
            "AsyncDiLoCo(period=24)."
        )
    refusals = [term.inelastic for term in (strategy, *recipe.compressor.held(), recipe.topology)]
    if strategy.uses_servers and not servers:
        refusals.append(
            Inelastic(
                "its parameters would be lost with the worker that hosts them",
                "Start the first launcher with gossamer run --workers 2:8 --servers 1",
            )
        )
    for refusal in filter(None, refusals):
        raise AttachError(
            f"an elastic run cannot have the recipe {recipe!r}: {refusal.why}. {refusal.instead}; or run a fixed "
            "number of workers: gossamer run --workers 4."
        )
    try:
        strategy.check_sizes(sizes, recipe.compressor, recipe.topology)
    except AttachError as error:
        raise AttachError(f"an elastic run cannot have the recipe {recipe!r}: {error}") from error


# -- attach's steps ----------------------------------------------------------------------------------------------------


def check_steps(steps: int | None) -> None:
    """Raise AttachError unless `steps` is a number of steps, or None."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1):
        raise AttachError(
            f"steps must be the optimizer steps of the training, 1 or more, got {steps!r}. Write "
            "gossamer.attach(..., steps=epochs * len(loader)), or leave steps out if they are unknown."
        )


def notice_few_rounds(recipe: Recipe, steps: int) -> None:
    """Give notice if `steps` have so few rounds of the recipe that little of the benefit would be retained."""
    from gossamer.algorithms.recipes.retained_benefit import low_rounds_remark  # it reads a table

    if (remark := low_rounds_remark(recipe, steps)) is not None:
        events.notice(remark)
