"""Checks of a recipe on the command line: once here, instead of in every worker.

Modules that import torch are imported when a recipe is checked, so that a command's help is fast."""

from __future__ import annotations

import click

from gossamer.errors import AttachError, RecipeError


def check_recipe(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Refuse an invalid recipe. @FILE: the recipe of an advice."""
    return None if text is None else readable_recipe(text)


def readable_recipe(text: str) -> str:
    """Text of a recipe for the workers; read from the advice if it is @FILE. Raises click.BadParameter."""
    from gossamer.algorithms.recipes.advice_reference import read_recipe
    from gossamer.algorithms.recipes.recipe import resolve

    try:
        text = read_recipe(text)
        resolve(text)
    except RecipeError as error:
        raise click.BadParameter(str(error)) from None
    return text


def check_session_recipe(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """The same as check_recipe, for workers that attach sessions."""
    return None if text is None else session_recipe(text)


def session_recipe(text: str) -> str:
    """The same as readable_recipe; refuses recipes of federated devices, which attach no session.

    An unknown term is accepted, since the script may define it: see script_terms.py.
    """
    from gossamer.algorithms.recipes.advice_reference import read_recipe
    from gossamer.algorithms.recipes.parser import UnknownTerm
    from gossamer.algorithms.recipes.recipe import resolve
    from gossamer.algorithms.strategies import FederatedStage

    try:
        text = read_recipe(text)
        stage = resolve(text).strategy.steady_stage
    except UnknownTerm:
        return text
    except RecipeError as error:
        raise click.BadParameter(str(error)) from None
    if isinstance(stage, FederatedStage):
        try:
            stage.refuse()
        except AttachError as error:
            raise click.BadParameter(str(error)) from None
    return text
