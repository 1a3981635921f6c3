"""Pictures of benchmarks/ladder.py: retained benefit with its interval, a row for each arm and a panel for each rung;
and over the number of rounds."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.ladder_arms import LOCK_STEP, SILENCE
from benchmarks.ladder_report import Results

from gossamer.algorithms.recipes.retained_benefit import MeasuredShare

POINT, LIMIT, HARM, STRIPE = "#0072B2", "#D55E00", "#FBE3C0", "#F5F7F9"
FONT = 8.5  # points
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"  # of tasks
LEFT, RIGHT = -0.35, 1.25  # of the axis; arrows stand for points beyond


def plot(found: Sequence[Results], path: Path) -> None:
    """Save the picture; rows from the most bytes to the fewest, as on the first rung that has them."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(arm for each in found for arm in each.compared))
    order = {arm: next(each.times_fewer(arm) for each in found if arm in each.runs) for arm in names}
    names.sort(key=lambda arm: order[arm])
    figure = Figure(figsize=(3.0 + 2.8 * len(found), 0.26 * len(names) + 1.2), layout="constrained", dpi=120)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, each in zip(panels, found, strict=True):
        _panel(axes, each, names)
    labels = [f"{arm}  1/{order[arm]:,.0f}" if isfinite(order[arm]) else arm for arm in names]
    panels[0].set_yticks(range(len(names)), labels, fontsize=FONT)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    says = (
        "retained benefit with 95 % interval over seeds; 0 %: never communicating, 100 %: lock step; "
        "beside each name: its bytes over those of lock step"
    )
    figure.supxlabel(
        fill(says, 45 * (1 + len(found))),
        x=0.01,
        ha="left",
        fontsize=FONT,
        color="#555555",
    )
    figure.savefig(path)


def _panel(axes: Any, each: Results, names: Sequence[str]) -> None:
    for row in range(0, len(names), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=STRIPE, linewidth=0, zorder=0)
    axes.axvspan(LEFT, 0, color=HARM, alpha=0.5, linewidth=0, zorder=1)
    axes.axvline(1, color=LIMIT, linewidth=0.8, zorder=1)
    axes.axvline(0, color="#777777", linewidth=0.8, zorder=1)
    for row, arm in enumerate(names):
        if arm in each.runs and arm not in (LOCK_STEP, SILENCE):
            _point(axes, row, each.retained(arm))
    axes.set_xlim(LEFT, RIGHT)
    axes.set_xticks([0, 0.5, 1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_title(each.rung.name, loc="left", fontsize=FONT + 1, fontweight="bold")
    axes.tick_params(labelsize=FONT - 0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _point(axes: Any, row: int, share: Any) -> None:
    if share.value < LEFT:
        text = "diverged" if not isfinite(share.value) else f"{100 * share.value:.0f} %"
        axes.annotate(f"\u2190 {text}", (LEFT + 0.02, row), va="center", fontsize=FONT - 1, color=POINT)
        return
    if isfinite(share.low):
        axes.plot([max(LEFT, share.low), min(RIGHT, share.high)], [row, row], color=POINT, linewidth=1.2, zorder=3)
    axes.plot([share.value], [row], "o", color=POINT, markersize=5, zorder=4)


def plot_rounds(shares: Sequence[MeasuredShare], path: Path) -> None:
    """Save a picture of the retained benefit over the number of rounds, a color for each task."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(6.4, 3.9), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.axhline(1, color=LIMIT, linewidth=0.8, zorder=1)
    tasks = dict.fromkeys(share.task for share in shares)
    for task, color in zip(tasks, COLORS, strict=False):
        mine = [share for share in shares if share.task == task]
        rounds, values = [share.rounds for share in mine], [share.value for share in mine]
        lengths = [[share.value - share.low for share in mine], [share.high - share.value for share in mine]]
        axes.errorbar(rounds, values, lengths, fmt="o", color=color, markersize=4.5, elinewidth=0.9, label=task)
    axes.set_xscale("log")
    ticks = [20, 50, 100, 200, 500, 1000, 2000]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, RIGHT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("rounds: steps of the training over the period of the recipe", fontsize=FONT)
    axes.set_ylabel("retained benefit with 95 % interval", fontsize=FONT)
    axes.tick_params(labelsize=FONT - 0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=FONT - 0.5, loc="lower right", frameon=False)
    figure.savefig(path)
