"""Picture of benchmarks/convergence.py, from its page's tables: what compressors cost in loss."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.dot_plot import Dot, Panel, draw
from benchmarks.markdown_tables import Cells, loss, rows, sections
from benchmarks.studies import DENSE

SAYS = (
    "Circles: training loss at the end, a line as long as its standard deviation over seeds to both sides. Diamonds: "
    "the loss that Dense() has when it has sent as many bytes; the farther to the right of the circle, the more a "
    "compressor is worth. Vertical: Dense() after as many steps, and its standard deviation. At the edge: how many "
    "times fewer bytes than Dense() a worker sends; those that send most stand at the top."
)


def plot(text: str, path: Path) -> None:
    """Draw the tables of a page's part, a panel for each task."""
    tasks = {task: {line["compressor"]: line for line in rows(part)} for task, part in sections(text).items()}
    tasks = {task: lines for task, lines in tasks.items() if DENSE in lines}
    draw(
        [_panel(task, lines) for task, lines in tasks.items()],
        _order(tasks),
        path,
        across="training loss",
        says=SAYS,
        log=True,
    )


def _order(tasks: Mapping[str, Mapping[str, Cells]]) -> list[str]:
    """All compressors, those that send most first, whatever the task."""
    names = dict.fromkeys(name for lines in tasks.values() for name in lines if name != DENSE)
    fewer = {name: [_fewer(lines[name]) for lines in tasks.values() if name in lines] for name in names}
    return sorted(names, key=lambda name: statistics.median(fewer[name]))


def _panel(task: str, lines: Mapping[str, Cells]) -> Panel:
    dots = {name: _dot(line) for name, line in lines.items()}
    return Panel(task, {name: dot for name, dot in dots.items() if name != DENSE}, dots[DENSE])


def _dot(line: Cells) -> Dot:
    found, affordable = loss(line["training loss"]), line.get("Dense() for the same bytes") or ""
    return Dot(
        found.mean,
        found.spread,
        f"{_fewer(line):.0f}x",
        loss(affordable.partition("(")[0] or affordable).mean if affordable else None,
    )


def _fewer(line: Cells) -> float:
    """Times fewer bytes than Dense(): 13.8 for "1/13.8"."""
    return float(line["of Dense()"].partition("/")[2].replace(",", ""))
