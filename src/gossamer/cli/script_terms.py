"""Script terms: recipes whose compressor or strategy is defined in the training script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.parser import UnknownTerm
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.registry import unknown_to_servers
from gossamer.plan.profile.user_script import attached_by


def refuse_unknown_terms(text: str | None, script: Path, as_module: bool = False, *, servers: int = 0) -> None:
    """Refuse a recipe with a term that neither Gossamer nor the script defines, or that servers would not know.

    Args:
        text: The recipe, or None.
        script: The training script, or with `as_module` the dotted name of a module, which is not searched.
        servers: The number of server processes, which do not run the script.
    """
    name = _unknown_term(text, script, as_module)
    if name is not None and servers:
        raise click.BadParameter(unknown_to_servers(name))


def register_terms(script: Path, arguments: Sequence[str], texts: Iterable[str]) -> None:
    """Register the terms that a script defines, if a recipe needs them: run it in this process until it attaches.

    Raises:
        click.BadParameter: A recipe has a term that the script does not register.
    """
    unknown = [name for text in texts if (name := _unknown_term(text, script)) is not None]
    if unknown:
        attached_by(script, arguments, resolve(None))
    for name in unknown:
        if name not in NOUNS:
            raise click.BadParameter(
                f"{script} contains {name} but does not register it. Write gossamer.register({name}) above "
                "gossamer.attach."
            )


def _unknown_term(text: str | None, script: Path, as_module: bool = False) -> str | None:
    """The first unknown term of a recipe; None without one. Refuse a term that the script does not contain."""
    try:
        resolve(text)
    except UnknownTerm as error:
        if not as_module and not re.search(
            rf"\b{re.escape(error.name)}\b", script.read_text(encoding="utf-8", errors="replace")
        ):
            raise click.BadParameter(str(error)) from None
        return error.name
    return None
