"""Picture of benchmarks/local.py, from its page's table: what talking less costs, by learning rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.dot_plot import Dot, Panel, draw
from benchmarks.local_report import ALONE, DENSE, LEARNING_RATE, SILENT
from benchmarks.markdown_tables import Cells, loss, rows

SAYS = (
    "Circles: held-out loss at the end, a line as long as its standard deviation over seeds to both sides. Vertical: "
    "Dense() at the same learning rate, and its standard deviation. Dashed: four workers that never talk, on average. "
    "At the edge: what a worker sent in the whole training; recipes that sent most stand at the top."
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
    dashed = {"never talking": dots[SILENT].loss} if SILENT in dots else {}
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
