"""Flight dump: the latest operations of one rank as a JSON file; and of all ranks in torchfrtrace's format.

torchfrtrace compares the operations of all ranks, and reports the first one that differs or that some have not begun.
Its files are pickles of plain dicts. They are written for it on request, and never read here.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.base import bounded_file
from gossamer.base.flight_recorder import FlightRecorder
from gossamer.base.json_text import read_json

FORMAT_VERSION = "2.10"  # of torchfrtrace's files
PREFIX = "gossamer_rank_"  # of file names, before the rank
# Our names of operations to torchfrtrace's; it compares unknown ones by their position only
KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "broadcast": "broadcast",
    "all-reduce + all-gather": "allreduce_coalesced",
}
OTHER = "barrier"
COLUMNS = ("place", "world", "number", "name", "bytes_sent", "step", "bucket", "began", "answered")

Dump = Mapping[str, Any]


def flight_path(directory: Path, rank: int) -> Path:
    return directory / f"flight-{rank}.json"


def write_flight(path: Path, recorder: FlightRecorder, clock: Callable[[], float] = time.time) -> None:
    """Write the file atomically. Times are unix seconds; `answered` is null for an operation without an answer."""
    begun, operations = recorder.begun, recorder.operations()
    moved = clock() - time.perf_counter()
    rows = [
        (
            *each.group,
            each.number,
            each.name,
            each.nbytes,
            each.step,
            each.bucket,
            each.began + moved,
            each.answered + moved if each.answered else None,
        )
        for each in operations
    ]
    dump = {"first": max(0, begun - len(rows)), "columns": COLUMNS, "operations": rows}
    bounded_file.write_whole(path, json.dumps(dump))


def read_flights(directory: Path) -> dict[int, Dump]:
    """The dumps by rank. Raises ValueError for an invalid file."""
    return {
        int(path.stem.split("-")[1]): read_json(bounded_file.read_text(path))
        for path in directory.glob("flight-*.json")
    }


def write_for_torchfrtrace(flights: Mapping[int, Dump], directory: Path) -> list[Path]:
    """Write one file per rank, named PREFIX and the rank. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for rank, flight in flights.items():
        path = directory / f"{PREFIX}{rank}"
        path.write_bytes(pickle.dumps(torch_dump(rank, flight), protocol=4))
        written.append(path)
    return written


def torch_dump(rank: int, flight: Dump) -> dict[str, Any]:
    """The operations of one rank, as plain dicts for torchfrtrace."""
    operations = [dict(zip(flight["columns"], row, strict=True)) for row in flight["operations"]]
    groups = {_group(rank, each) for each in operations}
    return {
        "version": FORMAT_VERSION,
        "pg_config": {
            _named(ranks): {"name": _named(ranks), "desc": "gossamer", "ranks": str(list(ranks))} for ranks in groups
        },
        "pg_status": {},
        "entries": [_entry(rank, flight["first"] + place, each) for place, each in enumerate(operations)],
    }


def _entry(rank: int, record: int, operation: Mapping[str, Any]) -> dict[str, Any]:
    sent, received = _numels(operation)
    answered = operation["answered"]
    bucket = f", bucket {operation['bucket']}" if operation["bucket"] else ""
    return {
        "record_id": record,
        "op_id": operation["number"] + 1,
        "pg_id": 0,
        "process_group": (_named(_group(rank, operation)), "gossamer"),
        "collective_seq_id": operation["number"] + 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"gloo:{KINDS.get(operation['name'], OTHER)}",
        "input_sizes": [[sent]],
        "output_sizes": [[received]],
        "input_dtypes": ["Byte"],
        "output_dtypes": ["Byte"],
        "state": "started" if answered is None else "completed",
        "time_created_ns": _nanoseconds(operation["began"]),
        "time_discovered_started_ns": _nanoseconds(operation["began"]),
        "time_discovered_completed_ns": None if answered is None else _nanoseconds(answered),
        "duration_ms": None if answered is None else 1000 * (answered - operation["began"]),
        "retired": answered is not None,
        "timeout_ms": 0,
        "frames": [{"name": f"{operation['name']} of step {operation['step']}{bucket}", "filename": "", "line": 0}],
    }


def _numels(operation: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of input and output elements from the bytes sent; 0 if ranks may send different amounts."""
    world, sent = operation["world"], operation["bytes_sent"]
    if world > 1 and operation["name"] == "all-reduce":
        return (round(sent * world / (2 * (world - 1))),) * 2
    if world > 1 and operation["name"] == "all-gather":
        return round(sent / (world - 1)), world * round(sent / (world - 1))
    return 0, 0


def _group(rank: int, operation: Mapping[str, Any]) -> Sequence[int]:
    first = rank - operation["place"]
    return tuple(range(first, first + operation["world"]))


def _named(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}"


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
