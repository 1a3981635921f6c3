"""Page of a comparison: records with a table, their curves, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from gossamer.observe.pages.charts import (
    Axis,
    BarGroup,
    BarPart,
    ChartLine,
    axis_around,
    bar_chart,
    line_chart,
    part_key,
)
from gossamer.observe.pages.page import card, command_line, document, key, table
from gossamer.observe.panels import BARS_TEXT, COMMUNICATION, TRAINING, Panel, StepBars, panels, step_bars
from gossamer.observe.record import Record

STYLES = 8  # number of colors of pages
MARGIN = 0.05


def write_page(
    path: Path,
    *,
    title: str,
    about: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    records: Sequence[Record],
    command: str,
) -> None:
    """Write the page of `records`. header, rows: a table with a row for each record; command: that made them."""
    body = [
        "<tr>" + "".join(f"<td{NAME * (not place)}>{escape(cell)}</td>" for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    ]
    content = (
        f'<section class="card answer same"><h1>{escape(title)}</h1><p>{escape(about)}</p>',
        f"{command_line(command)}</section>",
        '<div class="grid">',
        card("Recipes", table(header, body, left=header[:1]), whole=True),
        *map(_curves, panels(records, "loss")),
        _step_times(step_bars(records)),
        "</div>",
    )
    path.write_text(document("compare", title, content), encoding="utf-8")


NAME = ' class="name"'


def _style(place: int) -> str:
    return f"s{place % STYLES}"


def _curves(panel: Panel) -> str:
    """The axis is limited to smoothed losses, since initial losses would flatten the curves."""
    if panel.empty:
        return card(panel.title, f'<p class="note">nothing logged: session.log({escape(panel.up)}=...)</p>')
    lines = [
        ChartLine(name=curve.name, style=_style(place), label=str(place + 1), across=curve.across, up=curve.smoothed)
        for place, curve in enumerate(panel.curves)
    ]
    across = Axis(title=panel.across, low=0.0, high=max(value for line in lines for value in line.across))
    up = axis_around(panel.up, [value for line in lines for value in line.up], margin=MARGIN)
    names = key((line.style, f"{line.label} {line.name}") for line in lines)
    return card(panel.title, line_chart(lines, across, up, panel.title, whole=False) + names)


def _step_times(bars: Sequence[StepBars]) -> str:
    groups = [
        BarGroup(name=each.name, style=_style(place), bars=[*_milliseconds(each)]) for place, each in enumerate(bars)
    ]
    title = "time of a step by part"
    named = part_key([BarPart(name=part.name, style=part.key, hatch=part.hatch, length=0.0) for part in PARTS])
    return card(title, bar_chart(groups, "milliseconds per step", title, "ms") + named, BARS_TEXT, whole=True)


PARTS = (*TRAINING, *COMMUNICATION)


def _milliseconds(bars: StepBars) -> Iterator[list[BarPart]]:
    for parts in (bars.training, bars.communication):
        yield [BarPart(name=part.name, style=part.key, hatch=part.hatch, length=1000 * s) for part, s in parts]
