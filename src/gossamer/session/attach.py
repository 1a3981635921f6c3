"""Attach: checks a model and an optimizer, resolves the recipe and opens the session."""

from __future__ import annotations

import os

from torch import nn
from torch.optim import Optimizer

from gossamer import events
from gossamer.checkpoint.state import Stateful
from gossamer.core.term import Term, Terms
from gossamer.recipes.recipe import Recipe, resolve
from gossamer.session.gradient_guards import Scaler
from gossamer.session.session import Session
from gossamer.session.transport_setup import transport_for
from gossamer.session.validation import refuse, refuse_foreign_parameters, refuse_other_kinds
from gossamer.world import World, current


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    recipe: Recipe | Terms | Term | str | None = None,
    scaler: Scaler | None = None,
    clip_norm: float | None = None,
    scheduler: Stateful | None = None,
) -> Session:
    """Train `model` together with the other workers of this job, talking as `recipe` says; None means Dense().

    Works in place: the model's class, its state_dict and the loop stay as they are. When loss.backward() returns,
    gradients are averaged. scaler: the loop's GradScaler, so that all ranks skip the same steps; clip_norm: the largest
    norm of all averaged gradients together, applied before each optimizer step (compressors that own momentum have an
    argument of their own for it, DGC(clip=1.0), since what they average has momentum in it). scheduler: one that
    checkpoints hold; session.track(name=...) takes more.

    Raises AttachError for what cannot be served, RecipeError, and MismatchError where ranks are not alike.
    """
    refuse(model)
    refuse_other_kinds(optimizer)
    refuse_foreign_parameters(optimizer, model)
    world = current()
    resolved = resolve(_chosen(recipe, world), world.size)
    transport = transport_for(world, resolved)
    session = Session(model, optimizer, resolved, transport, world=world, scaler=scaler, clip_norm=clip_norm)
    if scheduler is not None:
        session.track(scheduler=scheduler)
    return session


def _chosen(recipe: Recipe | Terms | Term | str | None, world: World) -> Recipe | Terms | Term | str | None:
    """The command line's recipe where there is one: it beats the script's."""
    override = os.environ.get("GOSSAMER_RECIPE")
    if override is None:
        return recipe
    replaces = recipe is not None and resolve(recipe, world.size) != resolve(override, world.size)
    if replaces and world.is_first:  # once a job, whoever launched it
        events.notice(f"the command line's recipe, {override}, replaces the script's, {recipe}")
    return override
