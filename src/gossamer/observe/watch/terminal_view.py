"""Terminal view of a run: progress, every rank, stragglers, failures, last lines."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gossamer.base.units import bytes_text, range_text, ranks_text, seconds_text, share_text, short
from gossamer.errors import GossamerError
from gossamer.observe.control_sequences import without_controls
from gossamer.observe.watch.curves import read_curve
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.summary import read_findings, summarize
from gossamer.observe.watch.tables import LogFilter, read_failures, read_lines

LOOK_SECONDS = 1.0
BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "-"
MOST_RANKS, LINES = 24, 6
STYLES = {"failed": "bold red", "lost": "red", "waiting": "yellow", "training": "green", "finished": "green"}


def watch_in_terminal(
    runs: Sequence[WatchedRun], console: Console, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show the runs until Ctrl-C; once without a terminal or if all have ended."""
    if not console.is_terminal:
        console.print(screen(runs))
        return
    with Live(screen(runs), console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while not all(_ended(run) for run in runs):
            sleep(LOOK_SECONDS)
            live.update(screen(runs), refresh=True)


def screen(runs: Sequence[WatchedRun]) -> RenderableType:
    return Group(*(_shown(run) for run in runs))


def _ended(run: WatchedRun) -> bool:
    try:
        with run.reading() as db:
            return summarize(db)["ended"] is not None
    except (GossamerError, sqlite3.Error):
        return False


def _shown(run: WatchedRun) -> RenderableType:
    try:
        with run.reading() as db:
            return Group(*_parts(run, db), Text())
    except (GossamerError, sqlite3.Error) as problem:
        return Group(Text(run.name, style="bold"), Text(without_controls(str(problem)), style="yellow"), Text())


def _parts(run: WatchedRun, db: sqlite3.Connection) -> list[RenderableType]:
    summary = summarize(db)
    recipe = without_controls(str(summary["run"].get("recipe") or "recipe not known yet"))
    parts: list[RenderableType] = [
        Text.assemble((run.name, "bold"), "  ", recipe),
        Text(_numbers(summary), style="dim"),
    ]
    curve = [value for value in read_curve(db, "loss", 60).mean if value is not None]
    if curve:
        parts.append(Text.assemble("loss ", (spark(curve), "cyan"), f" {short(curve[-1])}"))
    findings, failures = read_findings(db, 3), read_failures(db)
    slow = {finding["rank"] for finding in findings if finding["now"]}
    parts.append(_ranks(summary["ranks"], slow) if summary["ranks"] else Text("No rank has begun yet."))
    parts += [
        Text(f"! rank {each['rank']}, {each['cause']}: {each['evidence']}", style="yellow" if each["now"] else "dim")
        for each in findings
    ]
    for failure in failures[:1]:
        took = f"; it caused the end of {ranks_text(failure['took'])}" if failure["took"] else ""
        parts.append(Text(f"✗ rank {failure['rank']}: {failure['message']}{took}", style="bold red"))
        parts.append(Text(failure["traceback"].rstrip()))
    for line in read_lines(db, LogFilter(), limit=LINES):
        who = line["stream"] if line["rank"] is None else f"rank {line['rank']}"
        parts.append(Text(f"{who:>9} │ {line['text'][:300]}", style=_line_style(line["level"]), no_wrap=True))
    return parts


def _numbers(summary: dict[str, Any]) -> str:
    pace = summary["pace"]
    texts = [summary["ended"] or "going on", f"step {summary['step'] or NONE}"]
    if pace:
        texts += [f"{seconds_text(pace['seconds'])} a step", f"{share_text(_share('waiting', pace))} waiting"]
        texts += [f"{bytes_text(pace['bytes_sent'])} sent per step and rank"]
    if estimated := summary["run"].get("estimated_seconds_per_step"):
        texts.append(f"estimate {seconds_text(estimated)} a step{_interval(summary)}")
    return " · ".join(texts)


def _share(name: str, pace: dict[str, float]) -> float:
    """A part of a step; 0 of a step that took no time by its clock."""
    return pace[name] / pace["seconds"] if pace["seconds"] else 0.0


def _interval(summary: dict[str, Any]) -> str:
    """The interval of the estimated step time, and whether the measured one is inside."""
    interval, pace = summary["run"].get("estimated_interval"), summary["pace"]
    if not interval:
        return ""
    low, high = interval["low_seconds"], interval["high_seconds"]
    where = f" ({'inside' if low <= pace['seconds'] <= high else 'outside'})" if pace else ""
    return f", {share_text(interval['coverage'])}: {range_text(low, high)}{where}"


def _ranks(ranks: list[dict[str, Any]], slow: set[int]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    by_speed = any(_part(rank) for rank in ranks)
    for name in (
        "rank",
        "state",
        "step",
        "a step",
        "computes",
        "waits",
        "sent a step",
        *["part"] * by_speed,
        "machine",
    ):
        table.add_column(name, justify="left" if name in ("state", "machine") else "right")
    worst = sorted(
        ranks, key=lambda rank: (rank["rank"] not in slow, rank["state"] not in ("failed", "lost"), rank["rank"])
    )
    for rank in sorted(worst[:MOST_RANKS], key=lambda rank: rank["rank"]):
        pace, state = rank["pace"], str(rank["state"] or NONE)
        numbers: tuple[str, ...] = (NONE,) * 4
        if pace:
            numbers = (
                seconds_text(pace["seconds"]),
                *(share_text(_share(name, pace)) for name in ("compute", "waiting")),
                bytes_text(pace["bytes_sent"]),
            )
        who = Text(str(rank["rank"]), style="yellow" if rank["rank"] in slow else "")
        cells: list[str | Text] = [who, Text(state, style=STYLES.get(state, "")), str(rank["step"] or NONE), *numbers]
        table.add_row(*cells, *[_part(rank) or NONE] * by_speed, Text(without_controls(str(rank["machine"] or NONE))))
    more = len(ranks) - MOST_RANKS
    return Group(table, Text(f"and {more} more ranks", style="dim")) if more > 0 else table


def _part(rank: dict[str, Any]) -> str:
    """The part of the work of a rank, if it follows its speed."""
    if rank["local_steps"] is not None:
        return f"{rank['local_steps']:g} local steps"
    return "" if rank["share"] is None else share_text(rank["share"])


def spark(values: Sequence[float]) -> str:
    """A character per value, from the minimum to the maximum."""
    halves = [value / 2 for value in values]  # differences of halves are finite, those of floats may not be
    low, high = min(halves), max(halves)
    return "".join(BLOCKS[round((value - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for value in halves)


def _line_style(level: str | None) -> str:
    return {"error": "red", "warning": "yellow"}.get(level or "", "dim")
