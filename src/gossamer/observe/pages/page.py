"""Page: one HTML file of cards and tables, light and dark, without further requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

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
from gossamer.observe.panels import BARS_TEXT, COMMUNICATION, TRAINING, Panel, StepBars, panels, step_bars
from gossamer.observe.record import Record


def document(command: str, title: str, content: Iterable[str]) -> str:
    """The whole file. command: the `gossamer` command that made it; content: parts of the page, as HTML."""
    return _template().substitute(
        command=escape(command), title=escape(title), colors=_colors(), content="\n".join(content)
    )


def card(title: str, body: str, note: str = "", whole: bool = False) -> str:
    """A part of the page. body: HTML; whole: as wide as the page, else half on a wide screen."""
    note_html = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card{" whole" * whole}"><h2>{escape(title)}</h2>{note_html}{body}</section>'


def table(header: Sequence[str], rows: Iterable[str], left: Collection[str] = ()) -> str:
    """rows: HTML, a `<tr>` each; left: names of left-aligned columns."""
    head = "".join(f"<th{LEFT * (name in left)}>{escape(name)}</th>" for name in header)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


LEFT = ' class="left"'


def command_line(command: str) -> str:
    """A command to copy; at most once per page."""
    return f'<div class="command"><code id="command">{escape(command)}</code><button id="copy">copy</button></div>'


def key(entries: Iterable[tuple[str, str]]) -> str:
    """Legend of curve colors. entries: (style, name)."""
    items = "".join(f'<li class="{style}"><i></i>{escape(name)}</li>' for style, name in entries)
    return f'<ul class="key">{items}</ul>'


@cache
def _template() -> Template:
    return Template((files("gossamer.observe.pages") / "page.html").read_text(encoding="utf-8"))


@cache
def _colors() -> str:
    """Colors of the page of `gossamer watch`."""
    return (files("gossamer.observe.watch") / "static" / "colors.css").read_text(encoding="utf-8").rstrip("\n")


# -- the page of a comparison: records with a table, their curves, and the parts of a step's time ----------------------

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
