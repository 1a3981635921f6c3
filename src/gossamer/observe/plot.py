"""Plot of records (matplotlib): loss over time and over bytes, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.base.figures import SOFT, figure, light_grid, open_frame, title
from gossamer.observe.panels import (
    BARS_TEXT,
    COMMUNICATION,
    TRAINING,
    Panel,
    Part,
    StepBars,
    panels,
    shortened,
    spread_apart,
    step_bars,
)
from gossamer.observe.record import Record

NAME_POINTS, TEXT_POINTS = 8.5, 8.0  # of fonts
BAR, ROW = 0.36, 1.0  # heights; a row has a recipe's two bars
CHARACTER = 0.0068  # approximate width of a letter, as a fraction of the bars' width


def plot(records: Sequence[Record], path: Path, metric: str = "loss") -> None:
    """Draw `records`, one color per recipe, into the PNG file `path`."""
    drawn(records, metric).savefig(path)


def plot_metrics(
    records: Sequence[Record], path: Path, metrics: Sequence[str], repeats: Sequence[Sequence[Record]]
) -> None:
    """Draw each metric over time and over bytes into the PNG file `path`: means over seeds, with their 95 % intervals.

    repeats: for each record, those of other seeds.
    """
    picture = figure(13, 4.6 * max(1, len(metrics)))
    rows = picture.subplots(max(1, len(metrics)), 2, squeeze=False)
    for row, metric in zip(rows, metrics or ("loss",), strict=True):
        for axes, panel in zip(row, panels(records, metric, repeats), strict=True):
            _draw_panel(axes, panel, named=True)
    picture.savefig(path)


def plot_panel(panel: Panel, path: Path) -> None:
    """Draw one panel into the PNG file `path`."""
    picture = figure(9, 4.6)
    _draw_panel(picture.subplots(), panel, named=True)
    picture.savefig(path)


def drawn(records: Sequence[Record], metric: str = "loss") -> Any:
    """The picture, as matplotlib's Figure."""
    picture = figure(13, 5.6 + 0.55 * len(records))
    above, below = picture.subfigures(2, 1, height_ratios=(4.4, 1.2 + 0.55 * len(records)))
    curves = above.subplots(1, 2)
    for axes, panel in zip(curves, panels(records, metric), strict=True):
        _draw_panel(axes, panel, named=len(records) > 1)
    _draw_bars(below.subplots(), step_bars(records))
    below.supxlabel(BARS_TEXT, x=0.01, ha="left", fontsize=TEXT_POINTS + 1, color=SOFT)
    if len(records) == 1:
        name = f"{shortened(records[0]['recipe'])}, {records[0]['workers']} workers"
        above.suptitle(name, x=0.01, ha="left", fontsize=10, color=SOFT)
    return picture


def _draw_panel(axes: Any, panel: Panel, named: bool) -> None:
    """Draw every value lightly and their running mean on top; names at the ends, at the height of their curves."""
    for curve in panel.curves:
        many = curve.smoothed is not curve.values
        if many and not curve.low:
            axes.plot(curve.across, curve.values, color=curve.color, linewidth=0.7, alpha=0.2)
        if curve.low:
            axes.fill_between(curve.across, *curve.band, color=curve.color, alpha=0.18, linewidth=0)
        single = "o" if len(curve.values) == 1 else ""
        axes.plot(curve.across, curve.smoothed, color=curve.color, linewidth=1.9, marker=single)
    title(axes, panel.title)
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.up)
    open_frame(axes)
    light_grid(axes)
    axes.set_xlim(left=0)
    if panel.empty:
        axes.text(0.5, 0.5, f"nothing logged:\nsession.log({panel.up}=...)", transform=axes.transAxes, ha="center")
    elif named:
        _name_ends(axes, panel)


def _name_ends(axes: Any, panel: Panel) -> None:
    axes.figure.figure.draw_without_rendering()  # the positions depend on the axes' size
    height = axes.get_window_extent().height * 72 / axes.figure.figure.dpi
    ended = [curve for curve in panel.curves if curve.values]
    ends = [(curve.across[-1], curve.smoothed[-1]) for curve in ended]
    fractions = [float(axes.transAxes.inverted().transform(axes.transData.transform(end))[1]) for end in ends]
    places = spread_apart(fractions, 1.25 * NAME_POINTS / height, 0.0, 1.0)
    for curve, end, place in zip(ended, ends, places, strict=True):
        axes.annotate(
            curve.name,
            end,
            (1.02, place),
            xycoords="data",
            textcoords="axes fraction",
            va="center",
            color=curve.color,
            fontsize=NAME_POINTS,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": curve.color,
                "linewidth": 0.8,
                "linestyle": ":",
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 0,
            },
        )


def _draw_bars(axes: Any, bars: Sequence[StepBars]) -> None:
    """Draw two bars per recipe, with labels where they fit; hatches identify parts without colors."""
    from matplotlib.patches import Patch

    longest = max(sum(seconds for _, seconds in part) for each in bars for part in (each.training, each.communication))
    for row, each in enumerate(bars):
        for offset, parts in ((-BAR / 2, each.training), (BAR / 2, each.communication)):
            _draw_bar(axes, ROW * row + offset, parts, longest)
    axes.set_yticks([ROW * row for row in range(len(bars))], [each.name for each in bars], fontsize=NAME_POINTS)
    for tick, each in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_color(each.color)
    axes.set_ylim(ROW * (len(bars) - 0.5), -0.5 * ROW)
    title(axes, "time of a step by part")
    axes.set_xlabel("milliseconds per step")
    open_frame(axes, without=("top", "right", "left"))
    axes.tick_params(axis="y", length=0)
    light_grid(axes, "x")
    key = [Patch(label=part.name, **_look(part)) for part in (*TRAINING, *COMMUNICATION)]
    axes.legend(
        handles=key,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=5,
        frameon=False,
        fontsize=TEXT_POINTS,
        handlelength=2,
    )


def _draw_bar(axes: Any, height: float, parts: Sequence[tuple[Part, float]], longest: float) -> None:
    left = 0.0
    for part, seconds in parts:
        axes.barh(height, 1000 * seconds, left=left, height=BAR, **_look(part))
        text = f"{part.name} {1000 * seconds:.3g} ms"
        if seconds > longest * CHARACTER * len(text):
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8} if part.hatch else None
            middle = left + 500 * seconds
            axes.text(middle, height, text, ha="center", va="center", fontsize=TEXT_POINTS - 0.5, bbox=box)
        left += 1000 * seconds


def _look(part: Part) -> dict[str, Any]:
    return {"facecolor": part.color, "hatch": part.hatch, "edgecolor": "#FFFFFF", "linewidth": 0.5}
