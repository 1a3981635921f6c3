"""Figures: pictures as files, drawn by matplotlib (the extra `plot`) in one style."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from gossamer.errors import GossamerError

# Safe for color-blind readers (Okabe and Ito)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#3B8FC4", "#000000")
SOFT = "#555555"  # of notes
TITLE_POINTS = 11


def check_matplotlib(hint: str = "") -> None:
    """Raise GossamerError, with the line to write, if matplotlib is not installed.

    Call it before a run with a picture at its end. hint: the part that works without matplotlib, after "; ".
    """
    if find_spec("matplotlib") is None:
        raise GossamerError(f'A picture needs matplotlib{hint}. Write: pip install "gossamer[plot]"')


def figure(width: float, height: float, dpi: int = 150) -> Any:
    """An empty matplotlib Figure of so many inches. Raises GossamerError where matplotlib is not installed."""
    check_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=dpi)


def title(axes: Any, text: str, points: float = TITLE_POINTS, **more: Any) -> None:
    """Name one part of a figure, at its upper left corner."""
    axes.set_title(text, loc="left", fontsize=points, fontweight="bold", **more)


def open_frame(axes: Any, *, without: tuple[str, ...] = ("top", "right")) -> None:
    """Leave out these sides of the frame around a plot."""
    axes.spines[list(without)].set_visible(False)


def light_grid(axes: Any, along: str = "both", alpha: float = 0.25) -> None:
    """Light lines at the ticks of the axis `along` ("x", "y" or "both"), behind the data."""
    axes.grid(axis=along, alpha=alpha, linewidth=0.6)
    axes.set_axisbelow(True)
