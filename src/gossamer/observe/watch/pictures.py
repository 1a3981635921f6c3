"""Pictures: grids as the columns and cells that the page draws, rounded to what an eye can tell apart."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from gossamer.observe.watch.grid import COMMUNICATION, TRAINING, Floats, Grid

DIGITS = 4
HEAT = ("waiting", "compute", "data", "seconds", "slowest", "wire", "encode", "decode", "bytes_sent", "steps")


def heat(grid: Grid, field: str) -> dict[str, Any]:
    """One row of cells per rank. waiting: as a share of the time; bytes_sent and steps: per second; others: seconds a
    step, the greatest of each cell for `slowest`."""
    return {
        "ranks": grid.ranks,
        "begin": grid.window.begin,
        "end": grid.window.end,
        "cells": [listed(row) for row in _values(grid, field)],
        "sampled": grid.sampled,
    }


def _values(grid: Grid, field: str) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        if field == "waiting":
            return grid.sums["waiting"] / grid.sums["seconds"]
        if field == "slowest":
            return grid.slowest
        if field in ("bytes_sent", "steps"):
            return grid.sums[field] / grid.sums["seconds"]
        return grid.per_step(field)


def over_time(grid: Grid) -> dict[str, Any]:
    """Where a step's time went, and the pace, steps per second: means over ranks of each rank's mean step in a cell, so
    which ranks ended how many steps there makes no difference."""
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # a cell in which no rank ended a step
        per_step = {
            name: np.nanmean(grid.per_step(name), axis=0) if grid.ranks else np.full(grid.window.cells, np.nan)
            for name in ("seconds", *TRAINING, *COMMUNICATION, "bytes_sent", "bytes_pulled")
        }
        slowest = np.nanmax(grid.slowest, axis=0, initial=-np.inf)
        fastest = np.nanmin(grid.fastest, axis=0, initial=np.inf)
    return {
        "at": grid.window.centers(),
        "parts": {name: listed(line) for name, line in per_step.items()},
        "pace": listed(1 / per_step["seconds"]),
        "slowest": listed(np.where(np.isfinite(slowest), slowest, np.nan)),
        "fastest": listed(np.where(np.isfinite(fastest), fastest, np.nan)),
        "sent": grid.total("bytes_sent"),
        "pulled": grid.total("bytes_pulled"),
        "steps": grid.total("steps"),
        "skipped": grid.total("skipped"),
        "seconds_per_step": grid.total("seconds") / max(1.0, grid.total("steps")),
        "sampled": grid.sampled,
    }


def listed(line: Floats) -> list[float]:
    """Numbers of DIGITS digits; what is not finite is encoded as null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(line))))
        rounded = np.where((line == 0) | ~np.isfinite(scale), line, np.round(line * scale) / scale)
    result: list[float] = rounded.tolist()
    return result
