"""Ingest: reads new lines of a run's files and writes them into the run's store, each line exactly once.

The offset of each file is written in the same transaction as its lines, so that after a kill no line is lost or read
twice. Two processes may read the same run at once. Further parts: lines of a file (`read_tail`) and their rows
(`take_*`).
"""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.base.units import ranks_text
from gossamer.observe.event_log import read_entry
from gossamer.observe.rank_record import DAMAGED
from gossamer.observe.telemetry.rows import MOST_CHARACTERS, NewRows
from gossamer.observe.telemetry.store import STORE_FILE, Thinning, name_causes, open_store

# -- tail --------------------------------------------------------------------------------------------------------------
# The lines added to a growing file since the last look, a few megabytes at a time.

MOST_BYTES = 2**22  # per look and file
MOST_LINE_BYTES = 2**16  # a longer line of text is cut in two


@dataclass(frozen=True)
class Tail:
    """Added lines without their ends; `offset`: start of the next look."""

    lines: list[bytes]
    offset: int
    more: bool  # whether the file has more bytes than one look reads


def read_tail(path: Path, offset: int, *, last: bool = False, cuts: bool = True) -> Tail:
    """Read the complete lines from `offset` on; empty if the file does not exist.

    A file that is shorter than `offset` was truncated, and is read from its start.

    Args:
        path: the file.
        offset: in bytes.
        last: whether no lines will follow; then a line without an end counts, too.
        cuts: whether to cut a long line before it is complete; otherwise only a line larger than a look is cut.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            offset = offset if offset <= size else 0
            file.seek(offset)
            block = file.read(MOST_BYTES)
    except OSError:
        return Tail([], offset, more=False)
    more = offset + len(block) < size
    whole = len(block) if last and not more else block.rfind(b"\n") + 1
    if not whole and len(block) > (MOST_LINE_BYTES if cuts else MOST_BYTES - 1):
        whole = len(block)
    lines = block[:whole].removesuffix(b"\n").split(b"\n") if whole else []
    return Tail(lines, offset + whole, more)


NAME = re.compile(
    r"(events|aside)-(\d+)\.jsonl|(boot|output|started|failure|finished|exited)-(\d+)-(\d+)\.(?:txt|json)"
)
STREAMS = {"boot": "stderr", "output": "stdout"}
LAUNCHER_FILE = "launcher.jsonl"

Ranks = Callable[[int], int | None]  # rank in the store by number in the files; None: not a worker


class Ingest:
    """Reads the run with logs in `folder`.

    Args:
        folder: of the logs and the store.
        store: its file; by default in the folder.
        directory: with the run's files; by default the newest private one, or the folder itself.
        ranks: maps numbers in files to ranks of the store; by default those of workers, by the launcher's report.
        forward: called with the written rows, for other machines.
        clock: unix seconds, for lines without a time.
        note: receives one sentence if an entry is damaged.

    Raises:
        StoreError: see open_store.
    """

    def __init__(
        self,
        folder: Path,
        *,
        store: Path | None = None,
        directory: Path | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.time,
        forward: Callable[[NewRows], None] = lambda rows: None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._folder, self._directory, self._clock = folder, directory, clock
        self._ranks = ranks or self._worker
        self._machine = socket.gethostname()
        self._done: set[str] = set()  # files with a single report that was read
        self.db = open_store(store or folder / STORE_FILE)
        self._most = self._worker_count()
        self._forward, self._note, self._is_noted = forward, note, False
        self._thinning = Thinning(self.db)

    def look(self, *, last: bool = False) -> bool:
        """Write new lines. Return whether more remain. last: no lines follow, so incomplete lines count."""
        files = sorted(_files(self._directory or _newest(self._folder)))
        with _writing(self.db):
            known = {row["path"]: row for row in self.db.execute("SELECT path, offset, memory FROM source")}
            rows = NewRows()
            more = False
            for path in files:
                key = f"{path.parent.name}/{path.name}"
                if key not in self._done:
                    more |= self._read(path, key, known.get(key), rows, last)
            rows.write(self.db)
            if "failure" in rows.touched:
                name_causes(self.db)
            self._thinning.look(rows.touched)
        self._forward(rows)
        return more

    def finish(self) -> None:
        """Read all remaining lines, and close the store."""
        while self.look(last=True):
            pass
        self.close()

    def close(self) -> None:
        self.db.close()

    def _read(self, path: Path, key: str, before: sqlite3.Row | None, rows: NewRows, last: bool) -> bool:
        offset, memory = (before["offset"], json.loads(before["memory"])) if before else (0, {})
        if _size(path) == offset:
            return False
        tail = read_tail(path, offset, last=last or path.suffix == ".json", cuts=path.suffix == ".txt")
        if tail.offset != offset:
            self._take(path, tail, memory, rows)
            rows.add("source", path=key, offset=tail.offset, memory=json.dumps(memory))
        if path.suffix == ".json" and tail.offset:
            self._done.add(key)
        return tail.more

    def _take(self, path: Path, tail: Tail, memory: Memory, rows: NewRows) -> None:
        if path.name == LAUNCHER_FILE:
            self._take_entries(tail, rows)
            return
        found = NAME.fullmatch(path.name)
        assert found is not None
        kind, attempt = found[1] or found[3], int(found[4] or 0)
        rank = self._ranks(int(found[2] or found[5]))
        if kind in STREAMS:
            self._print(rows, rank, attempt, STREAMS[kind], tail)
        elif rank is None:
            return
        elif kind in REPORTS:
            self._take_each(path, tail, lambda report: REPORTS[kind](rows, rank, attempt, report))
        elif kind == "events":
            self._take_each(path, tail, lambda entry: take_event(rows, rank, memory, entry))
        else:
            self._take_each(path, tail, lambda entry: take_aside(rows, rank, self._machine, entry))

    def _take_each(self, path: Path, tail: Tail, take: Callable[[dict[str, Any]], object]) -> None:
        """Take every entry; an entry with a damaged field is left out, so that it does not stop the others."""
        for entry in _entries(tail):
            try:
                take(entry)
            except DAMAGED as problem:
                if not self._is_noted:
                    self._is_noted = True
                    self._note(
                        f"{path} has an entry with an invalid field ({type(problem).__name__}: {problem}), so it "
                        "is left out. Check the disk: gossamer wrote another line."
                    )

    def _print(self, rows: NewRows, rank: int | None, attempt: int, stream: str, tail: Tail) -> None:
        at = self._clock()
        for line in tail.lines:
            text = line.removesuffix(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            if text.strip():
                rows.log(at, rank, attempt, stream, text)

    def _take_entries(self, tail: Tail, rows: NewRows) -> None:
        for entry in _entries(tail):
            match entry:
                case {"kind": "facts", "facts": facts}:
                    for key, value in facts.items():
                        rows.fact(key, value)
                    self._most = facts.get("workers") if facts.get("servers") else self._most
                case {"kind": "vitals"}:
                    take_vitals(rows, None, self._machine, entry)
                case {"kind": "note", "moment": at, "text": text}:
                    rows.log(at, None, None, "launcher", text)
                case {"kind": str(kind), "moment": at, **content}:
                    rows.event(at, None, kind, content)

    def _worker_count(self) -> int | None:
        """Number of workers among the numbers in files if servers follow them, else None."""
        found = dict(self.db.execute("SELECT key, value FROM run WHERE key IN ('workers', 'servers')").fetchall())
        return json.loads(found["workers"]) if json.loads(found.get("servers", "0")) else None

    def _worker(self, number: int) -> int | None:
        return number if self._most is None or number < self._most else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _newest(folder: Path) -> Path:
    """Private folder of the newest run with these logs."""
    return max(folder.glob(".run-*"), key=lambda each: each.stat().st_mtime_ns, default=folder)


def _files(directory: Path) -> Iterator[Path]:
    try:
        found = list(directory.iterdir())
    except OSError:  # removed meanwhile
        return
    yield from (path for path in found if path.name == LAUNCHER_FILE or NAME.fullmatch(path.name))


def _entries(tail: Tail) -> Iterator[dict[str, Any]]:
    for line in tail.lines:
        entry = read_entry(line)
        if entry is not None:
            yield _encodable(dict(entry)) if b"\\ud" in line else dict(entry)


def _encodable(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry without unpaired surrogates, which SQLite does not accept."""
    found: dict[str, Any] = json.loads(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace"))
    return found


def _writing(db: sqlite3.Connection) -> sqlite3.Connection:
    """A transaction that excludes other writers from now on; offsets are read inside it."""
    db.execute("BEGIN IMMEDIATE")
    return db


# -- entries -----------------------------------------------------------------------------------------------------------
# Rows of a rank's lines and its launcher's reports. File names identify the sources.
#
# events-RANK.jsonl             steps, metrics and rare events: the event log, the source of the record
# aside-RANK.jsonl              vitals, links, notices, warnings, errors of threads, group changes
# boot-ATTEMPT-RANK.txt         output of a worker before its two streams are joined
# output-ATTEMPT-RANK.txt       output after that
# launcher.jsonl                messages of the launcher, and its machine's vitals
# started-, failure-, finished-, exited-ATTEMPT-RANK.json     reports, written once

Entry = Mapping[str, Any]
Memory = dict[str, Any]  # context for the next lines of a file; JSON
RARE = {
    "collective",
    "servers",
    "saved",
    "switched",
    "closed",
    "left",
}  # kinds of the event log that become events unchanged


# -- the event log -----------------------------------------------------------------------------------------------------


def take_event(rows: NewRows, rank: int, memory: Memory, entry: Entry) -> None:
    """memory: `began`, unix seconds of the current session; `anew`, whether it has no step yet."""
    kind = entry.get("kind")
    if kind == "attached":
        _attached(rows, rank, memory, entry)
    if "began" not in memory:
        return  # log of a version without times
    at = memory["began"] + entry.get("at", 0.0)
    if kind == "steps":
        if memory.pop("anew", False):
            rows.rewind(rank, entry["step"] - len(entry["seconds"]))
        _steps(rows, rank, at, entry)
    elif kind == "logged":
        _logged(rows, rank, memory["began"], entry)
    elif kind in RARE:
        rows.event(at, rank, str(kind), _without(entry, "kind", "at"))
    elif kind == "tensors":
        for row in entry["tensors"]:
            rows.add("tensor", rank=rank, step=entry["step"], **row)
    if kind == "left":
        rows.know(rank, state="left")


def _attached(rows: NewRows, rank: int, memory: Memory, entry: Entry) -> None:
    if "moment" in entry:
        memory |= {"began": entry["moment"] - entry.get("at", 0.0), "anew": True}
        rows.know(rank, state="training", machine=entry.get("host"), pid=entry.get("pid"))
        rows.event(entry["moment"], rank, "attached", _without(entry, "kind", "at", "moment"))
        for key in ("recipe", "parameters"):
            rows.fact(key, entry.get(key))


def _steps(rows: NewRows, rank: int, at: float, entry: Entry) -> None:
    seconds, waiting, data = sum(entry["seconds"]), entry["waiting_seconds"], entry.get("data_seconds", 0.0)
    rows.add(
        "step",
        rank=rank,
        step=entry["step"],
        at=at,
        steps=len(entry["seconds"]),
        seconds=seconds,
        compute=max(0.0, seconds - waiting - data),
        encode=entry["encode_seconds"],
        wire=entry["wire_seconds"],
        decode=entry["decode_seconds"],
        waiting=waiting,
        data=data,
        bytes_sent=entry["bytes_sent"],
        bytes_pulled=entry["bytes_pulled"],
        skipped=entry["skipped_steps"],
    )


def _logged(rows: NewRows, rank: int, began: float, entry: Entry) -> None:
    for step, seconds, values in entry["points"]:
        for name, value in values.items():
            rows.add("metric", name=name, step=step, at=began + seconds, rank=rank, value=value)


# -- the aside log -----------------------------------------------------------------------------------------------------


def take_aside(rows: NewRows, rank: int, machine: str, entry: Entry) -> None:
    kind, at = str(entry.get("kind")), entry.get("moment")
    if kind == "vitals":
        take_vitals(rows, rank, machine, entry)
    elif kind == "links":
        for row in entry["links"]:
            rows.add("link", source=rank, target=row["process"], at=at, **_without(row, "process"))
    elif kind == "environment":
        rows.know(rank, environment=json.dumps(entry["versions"]))
    elif kind == "activity":
        _activity(rows, rank, at, entry)
    elif kind == "uncaught":
        message = f"{entry['summary']} (in thread {entry['thread']})"
        failure = {"kind": "uncaught", "message": message, "traceback": entry["traceback"], "caused_by": None}
        rows.add("failure", at=at, rank=rank, attempt=None, **failure)
    else:
        if kind == "joined":
            rows.know(rank, state="joined")
        rows.event(at, rank, kind, _without(entry, "kind", "moment"))


def _activity(rows: NewRows, rank: int, at: float | None, entry: Entry) -> None:
    """Ranks of a subgroup are numbered from its first one."""
    details = _without(entry, "kind", "moment", "seconds")
    if "place" in details:
        first = rank - details.pop("place")
        details["group"] = [first, details.pop("world")]
        details["waits_for"] = [first + each for each in details["waits_for"]]
        details["since"] = (at or 0.0) - entry["seconds"]
    rows.know(
        rank,
        state=entry["state"],
        waits_for=ranks_text(details.get("waits_for", ())) or None,
        activity=json.dumps(details) if "group" in details else None,
    )


def take_vitals(rows: NewRows, rank: int | None, machine: str, entry: Entry) -> None:
    for name, value in entry["values"].items():
        rows.add("vital", machine=machine, rank=rank, at=entry["moment"], name=name, value=value)


# -- reports -----------------------------------------------------------------------------------------------------------


def take_started(rows: NewRows, rank: int, attempt: int, report: Entry) -> None:
    began = {"attempt": attempt, "machine": report["host"], "pid": report["pid"], "began": report["moment"]}
    rows.know(rank, **began, ended=None, state="starting", waits_for=None, activity=None)


def take_failure(rows: NewRows, rank: int, attempt: int, report: Entry) -> None:
    kind, at = str(report["origin"]).lower(), report["moment"]
    rows.add(
        "failure",
        at=at,
        rank=rank,
        attempt=attempt,
        kind=kind,
        message=report["summary"][:MOST_CHARACTERS],
        traceback=report["traceback"][-MOST_CHARACTERS:],
        caused_by=None,
    )
    rows.know(rank, attempt=attempt, ended=at, state="failed")


def take_finished(rows: NewRows, rank: int, attempt: int, report: Entry) -> None:
    rows.know(rank, attempt=attempt, ended=report["moment"], state="finished")


def take_exited(rows: NewRows, rank: int, attempt: int, report: Entry) -> None:
    """A launcher observed the end of the process. Without its own report it was ended from outside."""
    exit_code, at = report["exit_code"], report["moment"]
    if not exit_code:
        return  # its own report has the state: finished or left
    stopped = report.get("stopped", False)
    state = "stopped" if stopped else "lost" if exit_code < 0 else "failed"
    rows.know(rank, attempt=attempt, ended=at, state=state)
    kind = "stopped" if stopped else "killed" if exit_code < 0 else "ended"
    text = {"kind": kind, "message": report["summary"], "traceback": None, "caused_by": None}
    rows.add("failure", at=at, rank=rank, attempt=attempt, **text)


Report = Callable[[NewRows, int, int, Entry], None]
REPORTS: Mapping[str, Report] = {
    "started": take_started,
    "failure": take_failure,
    "finished": take_finished,
    "exited": take_exited,
}


def _without(entry: Entry, *names: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in names}
