"""`gossamer recipes`: lists all terms of a recipe."""

from __future__ import annotations

import sys

import click

from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.catalog import NESTED, PRESETS, describe, example_of
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.registry import KINDS
from gossamer.cli.console import columns, echo, in_columns, wrapped


@click.command()
def recipes() -> None:
    """List the terms of recipes, with an example of each.

    A recipe joins at most one term of each kind by +, in any order, such as "TopK(density=0.01) + EveryStep()".
    """
    for kind in KINDS:
        _print_group(f"{kind} (default {getattr(resolve(None), kind)!r})", describe(kind))
    for kind, default in NESTED.items():
        _print_group(f"{kind} of a federated strategy (default {default!r})", describe(kind))
    _print_group("preset", [(name, repr(resolve(preset))) for name, preset in PRESETS.items()])
    chosen = (Auto.__doc__ or "").partition("\n")[0]
    _print_group("chosen while training", [("auto", chosen), (example_of(Auto), "The same, within bounds.")])


def _print_group(title: str, lines: list[tuple[str, str]]) -> None:
    width = columns(sys.stdout)
    click.secho(wrapped(title, width), bold=True)
    for line in in_columns(lines, width):
        echo(line)
