"""Entries: what a rank's lines and its launcher's reports mean as rows. Sources are told apart by their files' names.

events-RANK.jsonl             steps, metrics and what is rare: the event log, of which the record is made
aside-RANK.jsonl              vitals, links, notices, warnings, errors of threads, changes of the group
boot-ATTEMPT-RANK.txt         what a worker prints before its two streams are one
output-ATTEMPT-RANK.txt       what it prints then
launcher.jsonl                what its launcher says, and its machine's vitals
started-, failure-, finished-, exited-ATTEMPT-RANK.json     reports, written once
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gossamer.observe.telemetry.rows import MOST_CHARACTERS, NewRows

Entry = Mapping[str, Any]
Memory = dict[str, Any]  # what the next lines of a file need to be understood; JSON
RARE = {
    "collective",
    "servers",
    "saved",
    "switched",
    "closed",
    "left",
}  # kinds of the event log that become events as they are


# -- the event log -----------------------------------------------------------------------------------------------------


def take_event(rows: NewRows, rank: int, memory: Memory, entry: Entry) -> None:
    """memory: `began`, unix seconds of the session whose entries follow; `anew`, whether none of its steps has."""
    kind = entry.get("kind")
    if kind == "attached":
        _attached(rows, rank, memory, entry)
    if "began" not in memory:
        return  # the log of a version that did not tell when
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


# -- what is told aside ------------------------------------------------------------------------------------------------


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
    """Ranks of a group that is a part of the run are numbered from its first one."""
    told = _without(entry, "kind", "moment", "seconds")
    if "place" in told:
        first = rank - told.pop("place")
        told["group"] = [first, told.pop("world")]
        told["waits_for"] = [first + each for each in told["waits_for"]]
        told["since"] = (at or 0.0) - entry["seconds"]
    waits_for = ", ".join(map(str, told.get("waits_for", ())))
    rows.know(
        rank,
        state=entry["state"],
        waits_for=f"rank{'s' * (',' in waits_for)} {waits_for}" if waits_for else None,
        activity=json.dumps(told) if "group" in told else None,
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
    """A launcher saw the process end. Without an exit code of its own it was ended from outside."""
    exit_code, at = report["exit_code"], report["moment"]
    if not exit_code:
        return  # it has said itself whether it had finished, or left
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
