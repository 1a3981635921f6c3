"""Estimate of a run: the output of `gossamer explain --json`, compared with the measured step time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gossamer.base import bounded_file
from gossamer.base.json_text import read_json
from gossamer.base.units import range_text, seconds_text, share_text

if TYPE_CHECKING:
    from gossamer.observe.record import Record  # imports NumPy

WRITE = "Write gossamer explain --network SPEC --json FILE RECIPE SCRIPT, then `--forecast FILE`"

Forecast = dict[str, Any]


def read_forecast(path: Path | None) -> Forecast:
    """Read the estimate for a run's store; empty without a path. Raises click.BadParameter if it has no step time."""
    if path is None:
        return {}
    try:
        content = read_json(bounded_file.read_bytes(path))
        steps = content["estimate"] and float(content["estimate"]["step_seconds"])
        made_for = {"recipe": str(content["recipe"]), "workers": int(content["workers"])}
        made_for["network"] = content["estimate"] and str(content["estimate"]["inputs"]["network"])
        interval = _interval(content["estimate"] and content["estimate"].get("interval"))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as problem:
        raise click.BadParameter(
            f"{path} is not an estimate of `gossamer explain` ({problem or type(problem).__name__}). {WRITE}"
        ) from None
    if not steps or not 0 < steps < float("inf"):
        raise click.BadParameter(f"{path} has no step time: it was written without --network. {WRITE}")
    return {"estimated_seconds_per_step": steps, "estimated_for": made_for, **interval}


def _interval(content: Forecast | None) -> Forecast:
    """The interval; empty in files of earlier versions, which have one number."""
    if not content:
        return {}
    numbers = {name: float(content[name]) for name in ("low_seconds", "high_seconds", "coverage")}
    if not 0 < numbers["low_seconds"] <= numbers["high_seconds"] < float("inf"):
        raise ValueError(f"from {content['low_seconds']} to {content['high_seconds']} seconds is not an interval")
    return {"estimated_interval": numbers}


def verdict(forecast: Forecast, record: Record) -> str | None:
    """Compare the median step of a record with its estimate; None without an estimate or a step."""
    measured = record["seconds_per_step"]["median"]
    if not forecast or not measured:
        return None
    text = f"A step took {seconds_text(measured)}; estimated: {seconds_text(forecast['estimated_seconds_per_step'])}"
    if (interval := forecast.get("estimated_interval")) is None:
        return f"{text}."
    low, high = interval["low_seconds"], interval["high_seconds"]
    where = "inside" if low <= measured <= high else "outside"
    return f"{text}, {share_text(interval['coverage'])}: {range_text(low, high)}, and it is {where}."


forecast_option = click.option(
    "--forecast",
    "forecast_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of `gossamer explain --json`: `gossamer watch` compares the step time with it.",
)
