"""Timeline: draws a stage's schedule, with backward passes across and fragments down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from gossamer.algorithms.strategies import PeriodicSchedule, Stage

FEWEST_PASSES = 24
MOST_COLUMNS = 72
MOST_ROWS = 16
MOST_ROUNDS = 2_000  # more do not fit into the rows
COLUMNS_PER_TICK = 10

TRAINS, LEAVES, TRAVELS, LANDS, AT_ONCE = "·▲═▼◆"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A schedule as text."""

    passes_per_column: int
    axis: str  # numbers of backward passes, above the ends of their columns
    rows: tuple[tuple[str, str], ...]  # (name, marks)
    hidden_rows: int
    legend: str  # of the marks


def draw(stage: Stage) -> Drawing:
    """Draw at least two periods of a stage's schedule; long periods have several passes per column."""
    schedule = stage.schedule
    periods = max(2, -(-FEWEST_PASSES // schedule.period))
    passes = periods * schedule.period + schedule.delay
    width = next(width for width in _round_numbers() if -(-passes // width) <= MOST_COLUMNS)
    columns = -(-passes // width)
    rows = [*_site_rows(stage, columns), *_rows(stage, schedule, passes, width)]
    return Drawing(
        passes_per_column=width,
        axis=_axis(stage.start, columns, width),
        rows=tuple(rows[:MOST_ROWS]),
        hidden_rows=len(rows[MOST_ROWS:]),
        legend=_legend(stage, [marks for _, marks in rows]),
    )


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, 100 and so on."""
    return (step * 10**power for power in count() for step in (1, 2, 5))


def _axis(start: int, columns: int, width: int) -> str:
    labels = [f"{start + column * width:,}" for column in range(1, columns + 1)]
    tick = COLUMNS_PER_TICK * -(-(len(labels[-1]) + 1) // COLUMNS_PER_TICK)
    axis = "".join(label.rjust(tick) for label in labels[tick - 1 :: tick])
    first = labels[0]
    return first + axis[len(first) :] if width == 1 and not axis[: len(first) + 1].strip() else axis


def _site_rows(stage: Stage, columns: int) -> Iterator[tuple[str, str]]:
    if stage.per_site is not None:
        yield "gradients, by site", AT_ONCE * columns


def _rows(stage: Stage, schedule: PeriodicSchedule, passes: int, width: int) -> Iterator[tuple[str, str]]:
    rounds = list(islice(schedule.rounds_until(passes), MOST_ROUNDS if stage.communicates else 0))
    for fragment in range(schedule.fragments):
        own = [
            ((each.launch - 1) // width, (each.landing - 1) // width) for each in rounds if each.fragment == fragment
        ]
        for place, row in enumerate(_without_overlap(own) or [[]]):
            name = _name(stage, schedule, fragment) if place == 0 else ""
            yield name, _marks(row, -(-passes // width), " " if place else TRAINS)


def _name(stage: Stage, schedule: PeriodicSchedule, fragment: int) -> str:
    if not stage.local_parameters:
        return "gradients"
    return "parameters" if schedule.fragments == 1 else f"fragment {fragment}"


def _without_overlap(rounds: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Rounds on as few rows as possible without overlap."""
    rows: list[list[tuple[int, int]]] = []
    for leaves, lands in rounds:
        row = next((row for row in rows if row[-1][1] < leaves), None)
        if row is None:
            rows.append(row := [])
        row.append((leaves, lands))
    return rows


def _marks(rounds: Sequence[tuple[int, int]], columns: int, nothing: str) -> str:
    line, at = "", 0
    for leaves, lands in rounds:
        line += nothing * (leaves - at)
        line += AT_ONCE if leaves == lands else LEAVES + TRAVELS * (lands - leaves - 1) + LANDS
        at = lands + 1
    return (line + nothing * (columns - at))[:columns]


def _legend(stage: Stage, rows: Sequence[str]) -> str:
    apart = stage.local_parameters and stage.per_site is None
    meanings = {
        TRAINS: "trains apart" if apart else "adds up" if stage.passes_per_step > 1 else "trains",
        LEAVES: "leaves",
        TRAVELS: "travels",
        LANDS: "lands",
        AT_ONCE: "leaves and lands",
    }
    return "   ".join(f"{mark} {meaning}" for mark, meaning in meanings.items() if any(mark in row for row in rows))
