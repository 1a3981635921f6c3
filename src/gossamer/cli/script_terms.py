"""Script terms: recipes whose compressor or strategy is defined in the training script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from gossamer.algorithms.recipes.parser import UnknownTerm
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.plan.profile.user_script import attached_by


def refuse_unknown_terms(text: str | None, script: Path, as_module: bool = False) -> None:
    """Refuse a recipe with a term that is unknown here and that the script does not name.

    Args:
        text: The recipe, or None.
        script: The training script, or with `as_module` the dotted name of a module, which is not searched.
    """
    try:
        resolve(text)
    except UnknownTerm as error:
        if not as_module and not re.search(rf"\b{re.escape(error.name)}\b", script.read_text(errors="replace")):
            raise click.BadParameter(str(error)) from None


def register_terms(script: Path, arguments: Sequence[str], texts: Iterable[str]) -> None:
    """Register the terms that a script defines: run it in this process until it attaches, if a recipe needs that.

    Raises:
        click.BadParameter: A recipe has a term that the script does not register.
    """
    for text in texts:
        refuse_unknown_terms(text, script)
        try:
            resolve(text)
        except UnknownTerm as unknown:
            attached_by(script, arguments, resolve(None))
            try:
                resolve(text)
            except UnknownTerm:
                raise click.BadParameter(
                    f"{script} names {unknown.name} and does not register it. Write gossamer.register({unknown.name}) "
                    "above gossamer.attach."
                ) from None
