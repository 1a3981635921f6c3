"""HTML table of names and values, for the `_repr_html_` of objects in notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

CELL = "text-align:left;padding:1px 12px 1px 0"


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """A row for each name with its value; both are escaped."""
    lines = (
        f'<tr><th style="{CELL};font-weight:normal;opacity:0.7">{escape(name)}</th>'
        f'<td style="{CELL}">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{''.join(lines)}</table>"
