"""Page: one HTML file of cards and tables, light and dark, without further requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template


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
