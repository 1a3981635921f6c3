"""Picture: draws a timeline of a few steps (matplotlib), one row per track."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

from gossamer.base.figures import check_matplotlib, figure, open_frame
from gossamer.errors import GossamerError
from gossamer.observe.trace.timeline import Slice, SpanTrack, Timeline

COLORS = {
    "forward": "#8fb8de",
    "backward": "#4f7cac",
    "optimizer": "#7d5ba6",
    "waiting": "#e8e8e8",
    "encode": "#e0a458",
    "wire: waiting for an answer": "#e8e8e8",
    "decode": "#b5651d",
}
OPERATION, STEP, ARROW, TEXT = "#6a994e", "#f3efe4", "#bc4749", "#444444"
MOST_SLICES = 20_000  # more are not visible, and take minutes to draw
HEIGHT, ROW, SMALL = 0.8, 0.22, 7.0


def draw(timeline: Timeline) -> bytes:
    """Draw a PNG. Raises GossamerError without matplotlib, and for too many slices."""
    check_matplotlib()
    count = sum(1 for _ in timeline.slices())
    if count > MOST_SLICES:
        raise GossamerError(f"{count} slices are too many for a picture: choose some steps, as with --steps 100:102")
    from matplotlib.patches import Patch

    rows = [(process.name, track) for process in timeline.processes for track in process.tracks]
    shown = figure(11, 1.1 + ROW * len(rows), dpi=110)
    axes = shown.subplots()
    heights: dict[int, int] = {}
    for height, (_, track) in enumerate(rows):
        _draw_track(axes, height, track)
        heights |= {id(each): height for each in track.slices}
    _draw_arrows(axes, timeline, heights)
    named = [f"{process}: {track.name}" for process, track in rows]
    axes.set_yticks(range(len(rows)), named, fontsize=SMALL, color=TEXT)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds on one clock", fontsize=SMALL + 1, color=TEXT)
    axes.tick_params(labelsize=SMALL, colors=TEXT)
    open_frame(axes)
    keys = [Patch(color=color, label=name) for color, name in legend({each.name for each in timeline.slices()})]
    axes.legend(handles=keys, ncols=len(keys), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=SMALL)
    out = io.BytesIO()
    shown.savefig(out, format="png")
    return out.getvalue()


def legend(shown: Collection[str]) -> list[tuple[str, str]]:
    """(color, name) of the shown spans; a color with several names has the first one."""
    first = {color: name for name, color in reversed(COLORS.items()) if name in shown}
    return [*reversed(first.items()), (OPERATION, "an operation in progress")]


def _draw_track(axes: Any, height: int, track: SpanTrack) -> None:
    usual = STEP if track.name == "steps" else OPERATION
    bars = [(1000 * each.begin, 1000 * (each.end - each.begin)) for each in track.slices]
    colors = [COLORS.get(each.name, usual) for each in track.slices]
    axes.broken_barh(bars, (height - HEIGHT / 2, HEIGHT), facecolors=colors, edgecolor="white", linewidth=0.4)
    for each in track.slices if track.name == "steps" else ():
        axes.text(500 * (each.begin + each.end), height, each.name, ha="center", va="center", fontsize=SMALL - 1)


def _draw_arrows(axes: Any, timeline: Timeline, heights: dict[int, int]) -> None:
    leave = {flow: each for each in timeline.slices() for flow in each.sends}
    for each in timeline.slices():
        for flow in each.receives:
            _draw_arrow(axes, leave[flow], heights[id(leave[flow])], each, heights[id(each)])


def _draw_arrow(axes: Any, sent: Slice, above: int, came: Slice, below: int) -> None:
    how = {"arrowstyle": "->", "color": ARROW, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(1000 * came.end, below), xytext=(1000 * sent.begin, above), arrowprops=how)
