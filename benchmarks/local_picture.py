"""Picture of benchmarks/local.py, from its page's table: the loss of infrequent communication, by learning rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.dot_plot import Dot, Panel, draw
from benchmarks.local_report import ALONE, DENSE, LEARNING_RATE, SILENT
from benchmarks.markdown_tables import Cells, loss, rows

SAYS = (
    "Circles: final held-out loss, with its standard deviation over seeds. Vertical line: Dense() at the same learning "
    "rate, with its standard deviation. Dashed: four workers without communication, on average. At the right edge: "
    "bytes that one worker sent in the whole training; recipes with the most bytes are at the top."
)


def plot(text: str, path: Path) -> None:
    """Draw the table of the page's part."""
    lines = list(rows(text))
    rates = {_rate(line) for line in lines}
    panels = [_panel(rate, [line for line in lines if _rate(line) == rate]) for rate in sorted(rates)]
    names = dict.fromkeys(_recipe(line) for line in lines)
    shown = [name for name in names if name not in (DENSE, SILENT, ALONE)]
    draw(panels, shown, path, across="held-out loss, nats a byte", says=SAYS)


def _panel(rate: float, lines: Sequence[Cells]) -> Panel:
    dots = {_recipe(line): _dot(line) for line in lines}
    dashed = {"Silent()": dots[SILENT].loss} if SILENT in dots else {}
    return Panel(f"learning rate {rate:g}", _others(dots), dots[DENSE], dashed)


def _others(dots: Mapping[str, Dot]) -> dict[str, Dot]:
    return {name: dot for name, dot in dots.items() if name not in (DENSE, SILENT, ALONE)}


def _dot(line: Cells) -> Dot:
    found = loss(line["held-out loss"])
    return Dot(found.mean, found.spread, line["sent per worker"])


def _recipe(line: Cells) -> str:
    return line["recipe"].partition(", lr ")[0]


def _rate(line: Cells) -> float:
    return float(line["recipe"].partition(", lr ")[2] or LEARNING_RATE)
