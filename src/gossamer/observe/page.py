"""HTML page of a comparison: one file with the table and the curves, which fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from gossamer.observe.panels import BARS_SAY, panels, step_bars
from gossamer.observe.record import Record
from gossamer.observe.svg import bars_svg, panel_svg

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff; margin: 3rem auto; max-width: 78rem;
       padding: 0 1.5rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } p.about { color: #5c6b7a; margin-top: 0 }
table { border-collapse: collapse; width: 100%; margin: 1.5rem 0; font-variant-numeric: tabular-nums }
th { text-align: right; font-weight: 600; font-size: .8rem; color: #5c6b7a; border-bottom: 2px solid #dde3ea;
     padding: .4rem .6rem; vertical-align: bottom }
td { text-align: right; border-bottom: 1px solid #eef1f5; padding: .45rem .6rem }
th:first-child, td:first-child { text-align: left } td:first-child { font-family: ui-monospace, monospace }
svg { width: 100%; height: auto } p.note { color: #5c6b7a; font-size: .85rem }
div.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(32rem, 1fr)); gap: 1rem; margin-top: 1rem }
code { font-size: .85rem; color: #5c6b7a }
"""


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
    """Write the page, with pictures of `records`, which need no library to be drawn and nothing to be fetched."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    curves = "".join(map(panel_svg, panels(records, "loss")))
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{escape(title)}</h1><p class=about>{escape(about)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<div class=pair>{curves}</div>{bars_svg(step_bars(records))}<p class=note>{escape(BARS_SAY)}</p>"
        f"<p><code>{escape(command)}</code></p></html>\n",
        encoding="utf-8",
    )
