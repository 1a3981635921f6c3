"""Log lines: merged by time, filtered in the store, cut where they are long, and without what steers a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.synthetic_store import SyntheticRun
from support.watched_runs import hostile, made

from gossamer.observe.watch.log_lines import LONGEST_LINE, LogFilter, read_lines

RUN = SyntheticRun(ranks=3, steps=60)


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        (LogFilter(rank=1), lambda line: line["rank"] == 1),
        (LogFilter(rank=-1), lambda line: line["rank"] is None),
        (LogFilter(level="error"), lambda line: line["level"] == "error"),
        (LogFilter(level="warning"), lambda line: line["level"] in ("warning", "error")),
        (LogFilter(text="STEP 40"), lambda line: "step 40" in line["text"]),
        (LogFilter(text="100%_'"), lambda line: False),
    ],
)
def test_a_filter_gives_all_lines_that_it_wants(tmp_path: Path, wanted: LogFilter, holds: object) -> None:
    with made(tmp_path, RUN).reading() as db:
        everything = read_lines(db, LogFilter(), limit=1000)
        assert callable(holds)
        assert read_lines(db, wanted, limit=1000) == [line for line in everything if holds(line)]


def test_pages_give_every_line_once(tmp_path: Path) -> None:
    with made(tmp_path, RUN).reading() as db:
        everything = {line["id"] for line in read_lines(db, LogFilter(), limit=1000)}
        found: list[int] = []
        before = None
        while page := read_lines(db, LogFilter(), before=before, limit=4):
            found += [line["id"] for line in page]
            before = min(found)
        assert sorted(found) == sorted(everything)
        middle = sorted(everything)[5]
        assert {line["id"] for line in read_lines(db, LogFilter(), after=middle, limit=1000)} == {
            each for each in everything if each > middle
        }


def test_lines_come_by_time(tmp_path: Path) -> None:
    with made(tmp_path, RUN).reading() as db:
        moments = [line["at"] for line in read_lines(db, LogFilter(), limit=1000)]
    assert moments == sorted(moments)


def test_hostile_lines_are_short_and_plain(tmp_path: Path) -> None:
    with hostile(tmp_path, metrics=1).reading() as db:
        lines = read_lines(db, LogFilter(), limit=1000)
    assert max(len(line["text"]) for line in lines) == LONGEST_LINE
    assert {line["more"] for line in lines} == {0, 10_000_000 - LONGEST_LINE}
    assert not any("\x1b" in line["text"] or "taken\x07" in line["text"] for line in lines)
    assert any(line["text"] == "caf\ufffd \ufffd" for line in lines)
