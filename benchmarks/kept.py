"""Kept runs: one JSON file, whole at any moment; and the check that their losses are those of the present code.

A training of hours is not repeated after each commit. Instead a few of its runs, or a few rows of its page, are trained
again, and the page gets one line: "Trained again at commit ...". docs/site/measured_at.py counts changes since then.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.markdown_tables import named_rows
from benchmarks.page import between, put_between
from benchmarks.provenance import source_commit

UNCOMPARED = {"seconds", "cpu_seconds", "commit"}  # fields of a run that differ between machines and commits
AGAIN = "Trained again at commit"
Table = Mapping[str, Mapping[str, str]]  # cells by row, then by column


def read(path: Path) -> list[Any]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def write(path: Path, record: dict[str, Any]) -> None:
    """Whoever stops the program leaves the last record, or this one, and never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record) + "\n", encoding="utf-8")
    part.replace(path)


# -- the line on a page ------------------------------------------------------------------------------------------------


def lines_again(page: Path, part: str = "") -> list[str]:
    """The line of the last check, as long as the page has one: a report from the same runs keeps it."""
    text = between(page, part) if part else page.read_text(encoding="utf-8") if page.exists() else ""
    return [paragraph for paragraph in text.strip().split("\n\n") if paragraph.startswith(AGAIN)]


def put_line(page: Path, line: str, part: str = "") -> None:
    """Put the line after the paragraph that names the commit, in place of an earlier one.

    Args:
        page: file of the page.
        line: one paragraph.
        part: name of the page's markers; empty for a page without markers.
    """
    text = between(page, part) if part else page.read_text(encoding="utf-8")
    paragraphs = [each for each in text.strip().split("\n\n") if not each.startswith(AGAIN)]
    at = next((place for place, each in enumerate(paragraphs, 1) if "ritten from commit" in each), len(paragraphs))
    changed = "\n\n".join([*paragraphs[:at], line, *paragraphs[at:]])
    if part:
        put_between(page, part, changed)
    else:
        page.write_text(changed + "\n", encoding="utf-8")
    print(line, file=sys.stderr)


# -- stored runs -------------------------------------------------------------------------------------------------------


def drawn(
    runs: Sequence[Any], count: int, kind: Callable[[Any], str], seconds: Callable[[Any], float], seed: int = 0
) -> list[Any]:
    """Runs to train again: short ones are more likely, and no kind comes twice before each has come once.

    Args:
        runs: stored runs.
        count: how many to draw.
        kind: kind of recipe of a run.
        seconds: that a run takes, above 0. A run comes first with a probability proportional to 1 / seconds.
        seed: of the draw.
    """
    random = Random(seed)
    waiting = sorted((random.expovariate(1 / seconds(run)), place) for place, run in enumerate(runs))
    turns = Counter[str]()
    order: list[tuple[int, int, int]] = []
    for rank, (_, place) in enumerate(waiting):
        turns[kind(runs[place])] += 1
        order.append((turns[kind(runs[place])], rank, place))
    return [runs[place] for _, _, place in sorted(order)[:count]]


def differences(stored: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """Fields of a run that differ, bit for bit; with their relative difference where they are numbers."""
    same = json.loads(json.dumps(made))
    return [
        f"{name} {_changed(stored[name], same.get(name))}"
        for name in stored
        if name not in UNCOMPARED and stored[name] != same.get(name)
    ]


def _changed(old: Any, new: Any) -> str:
    if isinstance(old, float) and isinstance(new, float) and isfinite(old) and old:
        return f"{old:.6g}, now {new:.6g} (relative difference {abs(new - old) / abs(old):.1e})"
    return "changed" if isinstance(old, list) else f"{old}, now {new}"


def verify_runs(
    page: Path,
    part: str,
    runs: Sequence[Any],
    count: int,
    train: Callable[[Any], Mapping[str, Any]],
    name: Callable[[Any], str],
    kind: Callable[[Any], str],
    seconds: Callable[[Any], float],
    extent: str = "",
) -> None:
    """Train stored runs again, compare them bit for bit, and write the result as one line on the page.

    Args:
        page, part: as for put_line().
        runs, count, kind, seconds: as for drawn().
        train: trains a stored run again.
        name: of a run, for the line, where it differs.
        extent: part of the runs that is trained, such as "10 % of the steps of "; empty for all of it.
    """
    chosen, changed = drawn(runs, count, kind, seconds), dict[str, list[str]]()
    for stored in chosen:
        found = differences(stored, train(stored))
        print(f"{name(stored)}: {'; '.join(found) or 'equal'}", file=sys.stderr, flush=True)
        if found:
            changed[name(stored)] = found
    put_line(page, result(f"{extent}{len(chosen)} of {len(runs)} runs", "losses", changed), part)


# -- rows of a page, where the runs are not stored ---------------------------------------------------------------------


def verify_rows(page: Path, part: str, made: Table, names: int = 0, ignored: Sequence[str] = ()) -> None:
    """Compare rows that were trained again with those of the page, digit for digit, and write the result there.

    Args:
        page, part: as for put_line().
        made: cells of the rows that were trained again, named as named_rows() does.
        names: as for named_rows().
        ignored: columns that are not compared.

    Raises:
        SystemExit: the page has no such row, so nothing was compared.
    """
    text = between(page, part) if part else page.read_text(encoding="utf-8")
    known = named_rows(text, names)
    if missing := [name for name in made if name not in known]:
        sys.exit(f"{page} has no row {missing[0]!r}, so there is nothing to compare with it. Rows: {[*known]}")
    changed: dict[str, list[str]] = {}
    for name, cells in made.items():
        compared = [column for column in cells if column in known[name] and column not in ignored]
        found = [
            f"{column} {known[name][column]}, now {cells[column]}"
            for column in compared
            if known[name][column] != cells[column]
        ]
        print(f"{name}: {'; '.join(found) or 'equal'} ({', '.join(compared)})", file=sys.stderr, flush=True)
        if found or not compared:
            changed[name] = found or ["no column in common"]
    put_line(page, result(f"{len(made)} of {len(known)} rows", "figures", changed), part)


def result(counted: str, compared: str, changed: Mapping[str, Sequence[str]]) -> str:
    """The line of a page. `equal` is in it only if nothing differs: docs/site/measured_at.py looks for it."""
    if not changed:
        return f"{AGAIN} `{source_commit()}`: {counted}, equal {compared}."
    told = "; ".join(re.sub(r"\s+", " ", f"{name}: {', '.join(found)}") for name, found in changed.items())
    return f"{AGAIN} `{source_commit()}`: {counted}, {len(changed)} of them with other {compared}. {told}."
