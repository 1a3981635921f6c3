"""Ingest: each line of a run's files once, whatever is torn, restarted or killed in between."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from gossamer.events import Attached, Logged, StepEnded
from gossamer.observe.event_log import MOST_LOGGED, EventLog, read_entries
from gossamer.observe.rank_record import replay
from gossamer.observe.telemetry import Ingest, open_store
from gossamer.observe.telemetry.ingest import MOST_BYTES, MOST_LINE_BYTES, read_tail
from gossamer.observe.telemetry.rows import MOST_CHARACTERS
from gossamer.observe.watch.summary import summarize
from gossamer.observe.watch.tables import read_failures

BEGAN = 1_800_000_000.0


def numbers(rank: int, steps: int) -> list[str]:
    """The lines of one rank's event log: a step and a loss every tenth of a second."""
    lines: list[str] = []
    log = EventLog(lambda entry: lines.append(json.dumps(entry)))
    about: Mapping[str, Any] = {"layouts": (), "parameters": 3, "buffer_bytes": 0, "control_bytes": 0}
    log(Attached(moment=0.0, recipe="Dense()", rank=rank, world=2, **about))
    for step in range(1, steps + 1):
        log(StepEnded(moment=step / 10, step=step, seconds=0.1, waiting_seconds=0.03, data_seconds=0.02, bytes_sent=8))
        log(Logged(moment=step / 10, step=step, values={"loss": 1 / step if step % 7 else float("nan")}))
    log.end()
    return [json.dumps({**json.loads(lines[0]), "moment": BEGAN}), *lines[1:]]


def append(path: Path, *lines: str, torn: str = "") -> None:
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines) + torn)


def values(db: sqlite3.Connection, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in db.execute(query)]


@pytest.fixture
def ingest(tmp_path: Path) -> Iterator[Ingest]:
    reader = Ingest(tmp_path, clock=lambda: BEGAN + 1)
    yield reader
    reader.close()


def test_steps_and_metrics_are_those_that_were_logged(tmp_path: Path, ingest: Ingest) -> None:
    append(tmp_path / "events-1.jsonl", *numbers(1, 50))
    ingest.look()
    told = values(
        ingest.db, "SELECT MAX(step), SUM(steps), SUM(seconds), SUM(waiting), SUM(data), SUM(compute) FROM step"
    )
    assert told == [pytest.approx((50, 50, 5.0, 1.5, 1.0, 2.5))]
    assert values(ingest.db, "SELECT at FROM step WHERE step = 3") == [(BEGAN + 0.3,)]
    assert values(ingest.db, "SELECT step, value, at FROM metric WHERE step IN (2, 7)") == [
        (2, 0.5, BEGAN + 0.2),
        (7, None, BEGAN + 0.7),
    ]
    assert values(ingest.db, "SELECT state FROM rank") == [("training",)]


def test_bytes_that_come_one_by_one_make_the_same_rows(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    draws = random.Random(1)
    for folder in (whole, parts):
        folder.mkdir()
    lines = "".join(f"{line}\n" for line in numbers(0, 60)).encode()
    (whole / "events-0.jsonl").write_bytes(lines)
    Ingest(whole).finish()
    with (parts / "events-0.jsonl").open("ab", buffering=0) as file:
        while lines:
            count = draws.randrange(1, 600)
            file.write(lines[:count])
            lines = lines[count:]
            reader = Ingest(parts)  # each look by another, as if the one before had been killed
            reader.look()
            reader.close()
    told = []
    for folder in (whole, parts):
        db = open_store(folder / "run.sqlite", readonly=True)
        told.append([values(db, f"SELECT * FROM {table}") for table in ("step", "metric", "rank")])
        db.close()
    assert told[0] == told[1]


def test_a_kill_in_the_middle_of_a_look_leaves_it_to_the_next(
    tmp_path: Path, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read and how far are written together: the twin that notes first how far it read would lose lines."""
    append(tmp_path / "output-0-0.txt", "one", "two")
    append(tmp_path / "aside-0.jsonl", json.dumps({"kind": "noticed", "message": "a", "moment": BEGAN}))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("gossamer.observe.telemetry.store.Thinning.look", killed)
        with pytest.raises(KeyboardInterrupt):
            ingest.look()
    assert values(ingest.db, "SELECT * FROM log") == []
    ingest.look()
    ingest.look()
    assert values(ingest.db, "SELECT text FROM log") == [("one",), ("two",)]
    assert values(ingest.db, "SELECT COUNT(*) FROM event") == [(1,)]


def test_an_entry_with_a_damaged_field_does_not_stop_the_next_ones(tmp_path: Path, ingest: Ingest) -> None:
    attached, *lines = numbers(0, 3)
    damaged = [line.replace('"seconds"', '"sekonds"', 1) if '"step": 2' in line else line for line in lines]
    assert damaged != lines
    append(tmp_path / "events-0.jsonl", attached, *damaged)
    ingest.look()
    assert values(ingest.db, "SELECT step FROM step ORDER BY step") == [(1,), (3,)]
    assert replay(read_entries(tmp_path / "events-0.jsonl")) is None


def test_two_readers_at_once_do_not_write_a_line_twice(tmp_path: Path, ingest: Ingest) -> None:
    append(tmp_path / "output-0-0.txt", "one")
    other = Ingest(tmp_path)
    ingest.look()
    other.look()
    append(tmp_path / "output-0-0.txt", "two")
    other.look()
    ingest.look()
    other.close()
    assert values(ingest.db, "SELECT text FROM log") == [("one",), ("two",)]


def test_torn_lines_wait_and_those_of_a_killed_worker_are_passed_over(tmp_path: Path, ingest: Ingest) -> None:
    events = tmp_path / "events-0.jsonl"
    *lines, _ = numbers(0, 30)
    append(events, *lines[:5], torn=lines[5][:20])
    ingest.look()
    assert values(ingest.db, "SELECT MAX(step) FROM step") == [(3,)]
    append(events, "", *numbers(0, 2))  # it was killed there, and has begun again
    ingest.look()
    assert values(ingest.db, "SELECT step FROM step") == [(1,), (2,)]
    assert values(ingest.db, "SELECT MAX(step) FROM metric") == [(2,)]


def test_what_is_printed_keeps_its_last_version_and_reports_how_bad_it_is(tmp_path: Path, ingest: Ingest) -> None:
    append(tmp_path / "boot-0-1.txt", "cannot import")
    append(tmp_path / "output-2-1.txt", "1 %\r2 %\r99 %", "", "RuntimeError: no", "x: UserWarning: y", torn="end")
    ingest.look()
    assert len(values(ingest.db, "SELECT * FROM log")) == 4
    ingest.look(last=True)
    assert values(ingest.db, "SELECT at, rank, attempt, stream, level, text FROM log ORDER BY id") == [
        (BEGAN + 1, 1, 0, "stderr", "info", "cannot import"),
        (BEGAN + 1, 1, 2, "stdout", "info", "99 %"),
        (BEGAN + 1, 1, 2, "stdout", "error", "RuntimeError: no"),
        (BEGAN + 1, 1, 2, "stdout", "warning", "x: UserWarning: y"),
        (BEGAN + 1, 1, 2, "stdout", "info", "end"),
    ]


def report(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content))


def raised(folder: Path, rank: int, origin: str, at: float) -> None:
    about = {"exit_code": 1, "summary": f"{origin} of {rank}", "traceback": "Traceback ..."}
    report(folder / f"failure-0-{rank}.json", rank=rank, moment=BEGAN + at, origin=origin, **about)


def exited(folder: Path, rank: int, exit_code: int, at: float, *, stopped: bool = False) -> None:
    about = {"exit_code": exit_code, "summary": "it ended", "stopped": stopped}
    report(folder / f"exited-0-{rank}.json", moment=BEGAN + at, **about)


FAILURES = "SELECT rank, kind, caused_by FROM failure ORDER BY rank"


def test_the_first_error_is_the_cause_of_the_echoes_and_of_who_was_stopped(tmp_path: Path, ingest: Ingest) -> None:
    raised(tmp_path, 0, "ECHO", 2.0)
    raised(tmp_path, 1, "RAISED", 2.5)
    for rank, (code, at) in enumerate(((1, 3.0), (1, 3.1), (-15, 4.0), (0, 4.0))):
        exited(tmp_path, rank, code, at, stopped=at == 4.0)
    ingest.look()
    assert values(ingest.db, FAILURES) == [(0, "echo", 1), (1, "raised", None), (2, "stopped", 1)]
    assert values(ingest.db, "SELECT rank, state FROM rank") == [(0, "failed"), (1, "failed"), (2, "stopped")]


def test_a_killed_worker_is_the_cause_of_the_others_echoes(tmp_path: Path, ingest: Ingest) -> None:
    raised(tmp_path, 0, "ECHO", 2.0)
    exited(tmp_path, 0, 1, 2.1)
    exited(tmp_path, 1, -9, 2.0)
    ingest.look()
    assert values(ingest.db, FAILURES) == [(0, "echo", 1), (1, "killed", None)]


def test_a_rank_that_was_stopped_because_another_was_killed_is_no_cause(tmp_path: Path, ingest: Ingest) -> None:
    """Broken twin: both were ended by a signal; without what the launcher says, each would be a cause of its own."""
    exited(tmp_path, 0, -15, 2.1, stopped=True)
    exited(tmp_path, 1, -9, 2.0)
    ingest.look()
    assert values(ingest.db, FAILURES) == [(0, "stopped", 1), (1, "killed", None)]


def test_ranks_that_were_stopped_on_request_are_no_failures(tmp_path: Path, ingest: Ingest) -> None:
    exited(tmp_path, 0, -15, 2.0, stopped=True)
    exited(tmp_path, 1, -15, 2.1, stopped=True)
    ingest.look()
    assert values(ingest.db, FAILURES) == [(0, "stopped", None), (1, "stopped", None)]
    assert values(ingest.db, "SELECT rank, state FROM rank") == [(0, "stopped"), (1, "stopped")]
    assert summarize(ingest.db)["failures"] == 0
    assert read_failures(ingest.db) == []


@pytest.mark.parametrize("stopped", [True, False])
def test_an_interrupt_is_a_failure_unless_the_launcher_sent_it(tmp_path: Path, ingest: Ingest, stopped: bool) -> None:
    about = {"exit_code": 1, "summary": "KeyboardInterrupt", "traceback": "Traceback ...", "origin": "RAISED"}
    report(tmp_path / "failure-0-0.json", rank=0, moment=BEGAN + 2.0, **about)
    exited(tmp_path, 0, 1, 2.1, stopped=stopped)
    ingest.look()
    assert [failure["message"] for failure in read_failures(ingest.db)] == ([] if stopped else ["KeyboardInterrupt"])


def test_what_the_launcher_says_and_the_servers_it_has(tmp_path: Path, ingest: Ingest) -> None:
    told = [
        {"kind": "facts", "moment": BEGAN, "facts": {"workers": 2, "servers": 1, "script": "train.py"}},
        {"kind": "note", "moment": BEGAN, "text": "rank 1 was lost"},
        {"kind": "vitals", "moment": BEGAN, "values": {"load": 1.5}},
        {"kind": "dropped", "moment": BEGAN, "rows": 3},
    ]
    append(tmp_path / "launcher.jsonl", *map(json.dumps, told))
    ingest.look()
    report(tmp_path / "started-0-2.json", host="here", pid=1, moment=BEGAN)  # the server
    append(tmp_path / "output-0-2.txt", "serving")
    again = Ingest(tmp_path)  # it knows the same
    again.look()
    assert values(again.db, "SELECT rank FROM rank") == []
    assert values(again.db, "SELECT rank, text FROM log") == [(None, "rank 1 was lost"), (None, "serving")]
    assert values(again.db, "SELECT rank, name, value FROM vital") == [(None, "load", 1.5)]
    assert values(again.db, "SELECT kind, content FROM event") == [("dropped", '{"rows": 3}')]
    assert values(again.db, "SELECT value FROM run WHERE key = 'script'") == [('"train.py"',)]
    again.close()


PROGRAM = ROOT / "tests" / "support" / "collecting.py"


def kept(folder: Path) -> list[int]:
    db = open_store(folder / "run.sqlite")
    found = [json.loads(row["content"])["number"] for row in db.execute("SELECT content FROM event ORDER BY id")]
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    return found


@pytest.mark.processes
def test_kills_at_random_moments_lose_nothing_that_was_there(tmp_path: Path) -> None:
    draws = random.Random(5)
    written = 0
    for _ in range(3):
        collector = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert collector.stdin is not None
        assert collector.stdout is not None
        told = 0
        for _ in range(draws.randrange(20, 60)):
            with (tmp_path / "aside-0.jsonl").open("a") as file:
                for _ in range(draws.randrange(1, 200)):
                    file.write(json.dumps({"kind": "noticed", "moment": 1.0, "number": written}) + "\n")
                    written += 1
            collector.stdin.write(f"{written}\n")
            collector.stdin.flush()
            if draws.random() < 0.5:  # else it still reads, or writes, when the next lines come, or the kill
                told = int(collector.stdout.readline())
        collector.kill()
        collector.communicate()
        found = kept(tmp_path)
        assert found == list(range(len(found)))
        assert told <= len(found) <= written
    Ingest(tmp_path).finish()
    assert kept(tmp_path) == list(range(written))


# -- hostile -----------------------------------------------------------------------------------------------------------

# What ranks print and log is taken as what it is, however odd: nothing is lost, or it is cut with a mark.


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


def test_the_mutant_of_half_a_surrogate_is_refused_by_the_store(tmp_path: Path) -> None:
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
