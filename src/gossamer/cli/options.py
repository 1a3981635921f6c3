"""Options of several commands, checked alike."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gossamer.errors import RecipeError
from gossamer.launch.job import interfaces
from gossamer.recipes.recipe import resolve
from gossamer.transports.mesh.collective_selector import AUTO, check_wish


def check_recipe(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """A recipe that cannot be read is refused here once, instead of by every worker."""
    if text is not None:
        try:
            resolve(text)
        except RecipeError as error:
            raise click.BadParameter(str(error)) from None
    return text


def check_collective(context: click.Context, option: click.Parameter, wish: str | None) -> str | None:
    try:
        check_wish(wish or AUTO)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return wish


def check_interface(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    if name is not None and name not in interfaces():
        raise click.BadParameter(f"there is no {name!r} on this machine; there are: {', '.join(interfaces())}")
    return name


def check_parent(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """A file that could not be written is missed before the run, not after it."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent} to write {path.name} into")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise click.BadParameter(f"{path.parent} cannot be written, so there would be no {path.name}: name another")
    return path
