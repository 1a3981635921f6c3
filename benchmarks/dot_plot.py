"""Dot plot: a row for each recipe, named where it begins, and a panel for each task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

from gossamer.base import figures

OURS, DENSE, LINE, BAND, STRIPE = "#0072B2", "#D55E00", "#B8C2CC", "#FBE3C0", "#F5F7F9"
FONT = 8.5  # points
WIDEST_NAME = 60  # letters of a name's line


@dataclass(frozen=True)
class Dot:
    """A recipe's loss in one panel."""

    loss: float  # inf where it diverged
    spread: float
    note: str  # at the panel's edge, such as what was sent
    affordable: float | None = None  # the loss of Dense() after as many bytes


@dataclass(frozen=True)
class Panel:
    """One task, and what its recipes are held against."""

    title: str
    dots: Mapping[str, Dot]
    dense: Dot
    lines: Mapping[str, float] = field(default_factory=dict)  # other losses, by what stands beside them


def draw(
    panels: Sequence[Panel], names: Sequence[str], path: Path, *, across: str, says: str, log: bool = False
) -> None:
    """Rows are `names`, from the top down. says: what the marks are, below the picture. Logarithmic axes are each
    panel's own; others are one, so that panels can be held against each other."""
    labels = [fill(name, WIDEST_NAME, break_long_words=False) for name in names]
    edges = [0.0, *accumulate(0.14 + 0.14 * (label.count("\n") + 1) for label in labels)]  # inches
    spans = dict(zip(names, pairwise(edges), strict=True))
    figure = figures.figure(3.2 + 2.9 * len(panels), edges[-1] + 1.5, dpi=120)
    every = figure.subplots(1, len(panels), sharey=True, sharex=not log, squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=True):
        _draw_panel(axes, panel, spans, log)
        axes.set_xlabel(across, fontsize=FONT)
    every[0].set_yticks([sum(span) / 2 for span in spans.values()], labels, fontsize=FONT)
    every[0].set_ylim(edges[-1], 0)
    figure.supxlabel(fill(says, 40 * (1 + len(panels))), x=0.01, ha="left", fontsize=FONT, color="#555555")
    figure.savefig(path)


def _draw_panel(axes: Any, panel: Panel, spans: Mapping[str, tuple[float, float]], log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    dense = panel.dense
    for span in [*spans.values()][::2]:
        axes.axhspan(*span, color=STRIPE, linewidth=0, zorder=0)
    if dense.spread:
        axes.axvspan(dense.loss - dense.spread, dense.loss + dense.spread, color=BAND, linewidth=0, zorder=1)
    axes.axvline(dense.loss, color=DENSE, linewidth=0.8, zorder=1)
    for name, loss in panel.lines.items():
        axes.axvline(loss, color="#777777", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            name,
            (loss, 0),
            xycoords=("data", "axes fraction"),
            xytext=(-2, 3),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=FONT - 1.5,
            color="#777777",
        )
    for name, span in spans.items():
        if name in panel.dots:
            _draw_dot(axes, sum(span) / 2, panel.dots[name])
    figures.title(axes, panel.title, FONT + 1.5)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=5))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=FONT - 0.5)
    axes.tick_params(axis="y", length=0)
    figures.open_frame(axes, without=("top", "right", "left"))


def _draw_dot(axes: Any, row: float, dot: Dot) -> None:
    axes.annotate(
        dot.note,
        (1.01, row),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=FONT - 1.5,
        color="#555555",
        annotation_clip=False,
    )
    if not isfinite(dot.loss):
        axes.annotate(
            "diverged",
            (0.98, row),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=FONT - 1,
            color=OURS,
        )
        return
    if dot.affordable is not None and isfinite(dot.affordable):
        axes.plot([dot.loss, dot.affordable], [row, row], color=LINE, linewidth=1.2, zorder=2)
        axes.plot([dot.affordable], [row], "D", color=DENSE, fillstyle="none", markersize=4.5, zorder=3)
    axes.errorbar(dot.loss, row, xerr=dot.spread or None, fmt="o", color=OURS, markersize=5, elinewidth=1, zorder=4)
