"""What ranks print and log is taken as what it is, however odd: nothing is lost, or it is cut with a mark."""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gossamer.events import Attached, Logged
from gossamer.observe.event_log import MOST_LOGGED, EventLog
from gossamer.observe.telemetry import Ingest, open_store
from gossamer.observe.telemetry.ingest import MOST_BYTES, MOST_LINE_BYTES, read_tail
from gossamer.observe.telemetry.rows import MOST_CHARACTERS


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    Ingest(folder).finish()
    db = open_store(folder / "run.sqlite", readonly=True)
    db.text_factory = str
    found = [tuple(row) for row in db.execute(query)]
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    return found


def test_lines_of_any_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    printed = [b"\x1b[2J\x1b[31mred", b"<script>alert(1)</script>", b"caf\xe9 \xff", b"a\0b\0", "größer ▁█".encode()]
    (tmp_path / "output-0-0.txt").write_bytes(b"\n".join(printed) + b"\n")
    found = [text for (text,) in rows(tmp_path, "SELECT text FROM log ORDER BY id")]
    assert found == [line.decode(errors="replace") for line in printed]


@pytest.mark.parametrize("megabytes", [1, 10])
def test_a_line_of_ten_megabytes_is_cut_with_a_mark_and_the_next_is_whole(tmp_path: Path, megabytes: int) -> None:
    size = megabytes * 1_000_000
    (tmp_path / "output-0-0.txt").write_bytes(b"x" * size + b"\nafter\n")
    tracemalloc.start()
    found = [text for (text,) in rows(tmp_path, "SELECT text FROM log ORDER BY id")]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    *parts, after = found
    assert after == "after"
    assert len(parts) <= -(-size // MOST_BYTES)
    missing = [int(part.rpartition("[cut here: ")[2].split()[0]) for part in parts]
    assert sum(missing) + MOST_CHARACTERS * len(parts) == size  # nothing is missing without a word
    assert peak < 8 * MOST_BYTES


def attached() -> Attached:
    return Attached(rank=0, world=1, recipe="Dense()", parameters=1, layouts=(), buffer_bytes=0, control_bytes=0)


def test_a_thousand_metrics_and_what_is_not_finite_in_one_second(tmp_path: Path) -> None:
    lines: list[str] = []
    log = EventLog(lambda entry: lines.append(json.dumps(entry)))
    log(attached())
    names = ["loss", *(f"layer/{number}/größe" for number in range(998)), "half \ud800"]
    for step in range(1, 101):
        log(Logged(step=step, values={name: float("nan") if name == "loss" else float(step) for name in names}))
    log.end()
    assert max(map(len, lines)) < 100 * MOST_LOGGED < MOST_BYTES  # else a look could not read it
    (tmp_path / "events-0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert rows(tmp_path, "SELECT COUNT(*), COUNT(DISTINCT name), COUNT(value) FROM metric") == [
        (100_000, 1000, 99_900)
    ]
    assert rows(tmp_path, "SELECT COUNT(*) FROM metric WHERE name = 'half ?'") == [(100,)]


def test_the_twin_of_half_a_surrogate_is_refused_by_the_store(tmp_path: Path) -> None:
    db = open_store(tmp_path / "run.sqlite")
    with pytest.raises((UnicodeEncodeError, sqlite3.Error)):
        db.execute("INSERT INTO metric(name, rank, step) VALUES(?, 0, 0)", ("half \ud800",))
    db.close()


def test_a_long_entry_is_not_cut_while_it_is_written(tmp_path: Path) -> None:
    """The broken twin takes the half of it that is there, and then the other: two lines that mean nothing."""
    path = tmp_path / "events-0.jsonl"
    path.write_bytes(b"x" * (2 * MOST_LINE_BYTES))
    assert read_tail(path, 0, cuts=False).lines == []
    assert read_tail(path, 0, cuts=True).lines != []
    path.write_bytes(b"x" * (2 * MOST_LINE_BYTES) + b"\n")
    assert [len(line) for line in read_tail(path, 0, cuts=False).lines] == [2 * MOST_LINE_BYTES]
