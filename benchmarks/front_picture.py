"""Picture of benchmarks/front.py: a panel for each family, its recipes named where they stand, all others in gray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks.front_families import DENSE, FAMILIES
from benchmarks.front_report import Front
from benchmarks.virtual_workers import APART

from gossamer.base import figures

COLUMNS = 4
OURS, OTHERS, BAND = "#0072B2", "#CFCFCF", "#FBE3C0"
FONT = 7.5  # points
BEYOND = 1.4  # times the gap of those who never talk: what is worse than that need not be told apart
LEAST_TOP = 5.0  # percent
NEAR = ((1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1))
FAR = tuple((across, up) for far in range(2, 9) for up in (-far, far) for across in (0, 1, -1))
PLACES = (*NEAR, *FAR)  # a thin line leads to the far ones
SILENT = "never talking"


@dataclass(frozen=True)
class Box:
    """On the page, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.top, other.top) - max(self.bottom, other.bottom)
        return wide * high if wide > 0 and high > 0 else 0.0


def plot(found: Front, path: Path) -> None:
    drawn(found).savefig(path)


def drawn(found: Front) -> Any:
    """The picture, as matplotlib's Figure."""
    panels = _panels(found)
    columns = min(COLUMNS, len(panels)) or 1
    rows = max(1, -(-len(panels) // columns))
    figure = figures.figure(3.4 * columns, 2.7 * rows + 0.7, dpi=120)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    low, high = _limits(found)
    axes[0][0].set_xscale("log")
    axes[0][0].set_xlim(0.8, 2.5 * max(map(found.fewer, found.talking)))
    axes[0][0].set_ylim(low, high)
    for one in axes.flat[len(panels) :]:
        one.set_axis_off()
    for one, name in zip(axes.flat, panels, strict=False):
        _backdrop(one, found, high)
        figures.title(one, FAMILIES[name].about, 10, color=OURS)
        figures.open_frame(one)
        one.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}x")
        one.yaxis.set_major_formatter(lambda value, _: f"{value:+.0f} %" if value else "0")
        one.tick_params(labelsize=8, labelbottom=True)
        one.minorticks_off()
    figure.supxlabel("times fewer bytes than Dense() in float32", fontsize=10)
    figure.supylabel("held-out loss, gap to Dense()", fontsize=10)
    seeds = len(found.runs[DENSE])
    band = "" if seeds < 2 else "; the band: a standard deviation of Dense() over seeds"
    figure.suptitle(
        f"{found.plan.task}, {found.plan.setting.optimizer}, {found.plan.steps} steps, {seeds} "
        f"seed{'s' * (seeds > 1)}. Gray: all other recipes, and the front{band}; an arrow: worse than shown",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figure.draw_without_rendering()  # names are placed where points stand at last
    for one, recipes in zip(axes.flat, panels.values(), strict=False):
        _name(one, found, recipes, high)
    return figure


def _panels(found: Front) -> dict[str, dict[str, str]]:
    """Names of recipes by family and recipe, of those that were trained."""
    labels = found.plan.labels()
    shown: dict[str, dict[str, str]] = {}
    for text, name in found.plan.recipes().items():
        if text in found.runs and name in FAMILIES:
            shown.setdefault(name, {})[text] = labels[text]
    return shown


def _limits(found: Front) -> tuple[float, float]:
    """Of gaps, in percent: from a little below the best to a little above those who never talk."""
    gaps = [gap for gap in map(found.gap, found.talking) if isfinite(gap)]
    silent = found.gap(APART) if APART in found.runs else max(gaps)
    top = max(LEAST_TOP, BEYOND * silent) if isfinite(silent) else max(LEAST_TOP, *gaps)
    bottom = min(0.0, *gaps)
    return bottom - 0.08 * (top - bottom), top


def _backdrop(axes: Any, found: Front, high: float) -> None:
    """What is the same in every panel."""
    if isfinite(found.spread):
        axes.axhspan(-found.spread, found.spread, color=BAND, linewidth=0, zorder=0)
    axes.axhline(0, color="#999999", linewidth=0.6, zorder=1)
    if APART in found.runs and found.gap(APART) < high:
        axes.axhline(found.gap(APART), color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        place = (1, found.gap(APART))
        axes.annotate(
            SILENT,
            place,
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=7,
            color="#777",
        )
    seen = [text for text in found.talking if found.gap(text) < high]
    axes.scatter([*map(found.fewer, seen)], [*map(found.gap, seen)], s=9, color=OTHERS, linewidth=0, zorder=2)
    best = [text for text in found.front() if found.gap(text) < high]
    axes.plot([*map(found.fewer, best)], [*map(found.gap, best)], color=OTHERS, linewidth=1, zorder=1)


def _name(axes: Any, found: Front, recipes: Mapping[str, str], high: float) -> None:
    """Points of one family with their names beside them, each where it covers least of the others."""
    low, _ = axes.get_ylim()
    edge = high - 0.045 * (high - low)
    points = {text: (found.fewer(text), min(_known(found.gap(text), edge), edge)) for text in recipes}
    for x, y in points.values():
        beyond = y == edge
        axes.scatter([x], [y], s=34 if beyond else 22, marker="^" if beyond else "o", color=OURS, linewidth=0, zorder=4)
    scale = 72 / axes.figure.dpi  # points a pixel
    spots = {text: axes.transData.transform(point) * scale for text, point in points.items()}
    corners = axes.get_window_extent()
    frame = Box(corners.x0 * scale, corners.y0 * scale, corners.x1 * scale + 12, corners.y1 * scale)
    taken = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in spots.values()]
    taken += [_drawn_box(each, scale) for each in axes.texts]
    for text, (x, y) in sorted(spots.items(), key=lambda item: (-item[1][1], item[1][0])):
        name = recipes[text]
        if found.gap(text) > edge and isfinite(found.gap(text)):
            name += f", {found.gap(text):+.0f} %"
        elif not isfinite(found.gap(text)):
            name += ", diverged"
        place = min(PLACES, key=lambda at: (_covered(_box(x, y, name, at), taken, frame), PLACES.index(at)))
        box = _box(x, y, name, place)
        taken.append(box)
        at = ((box.left - x), (box.bottom - y))
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": OURS, "shrinkB": 3} if place in FAR else None
        where = {"textcoords": "offset points", "va": "bottom", "zorder": 5, "arrowprops": leader}
        axes.annotate(name, points[text], at, fontsize=FONT, **where)


def _known(gap: float, edge: float) -> float:
    return gap if isfinite(gap) else edge


def _box(x: float, y: float, name: str, place: tuple[int, int]) -> Box:
    """A name beside a point: `place` to the right or left of it, above or below."""
    wide, high = _width(name), 1.25 * FONT
    across, up = place
    left = x + 4.5 if across > 0 else x - 4.5 - wide if across < 0 else x - wide / 2
    bottom = y - high / 2 + up * (high if across == 0 else 0.8 * high)
    return Box(left, bottom, left + wide, bottom + high)


@cache
def _width(name: str) -> float:
    """Of a name, in points."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), name, size=FONT).get_extents().x1) + 1


def _drawn_box(text: Any, scale: float) -> Box:
    """Of a text that stands already."""
    corners = text.get_window_extent()
    return Box(corners.x0 * scale, corners.y0 * scale, corners.x1 * scale, corners.y1 * scale)


def _covered(box: Box, taken: Sequence[Box], frame: Box) -> float:
    inside = box.overlap(frame)
    outside = (box.right - box.left) * (box.top - box.bottom) - inside
    return 10 * outside + sum(box.overlap(other) for other in taken)
