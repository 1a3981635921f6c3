"""Forecast of a run: what `gossamer explain --json` foretold, kept beside what the run then measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gossamer.core.json_text import read_json

WRITE = "Write gossamer explain RECIPE SCRIPT --network SPEC --json FILE, and then --foretold FILE"

Forecast = dict[str, Any]


def read_forecast(path: Path | None) -> Forecast:
    """Facts for a run's store, none without a path. Raises click.BadParameter where no seconds are foretold there."""
    if path is None:
        return {}
    try:
        told = read_json(path.read_bytes())
        steps = told["foretold"] and float(told["foretold"]["step_seconds"])
        made_for = {"recipe": str(told["recipe"]), "workers": int(told["workers"])}
        made_for["network"] = told["foretold"] and str(told["foretold"]["inputs"]["network"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise click.BadParameter(f"{path} is no forecast ({problem or type(problem).__name__}). {WRITE}") from None
    if not steps or not 0 < steps < float("inf"):
        raise click.BadParameter(f"{path} foretells no step's seconds, for want of a network. {WRITE}")
    return {"foretold_seconds_per_step": steps, "foretold_for": made_for}


foretold_option = click.option(
    "--foretold",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="What `gossamer explain --json` foretold: `gossamer watch` shows it beside what is measured.",
)
