"""Report: progress lines while a federation runs, and the record of all rounds as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from gossamer.base.json_text import read_json
from gossamer.base.units import bytes_text
from gossamer.federated.deployment.files import replace_file
from gossamer.federated.round_record import RoundRecord, record_of
from gossamer.federated.server.rounds import Committed, Rounds

Line = Callable[[str], None]


class RoundReport:
    """Collects the records of rounds, on disk if `path` is set.

    The record of a version is written before the version is journaled, and again after its evaluation; the later line
    counts. Every journaled version is therefore in the report, even if the server is killed. Lines of later versions
    are from a server that was killed before it journaled them, and are ignored.

    Args:
        planned: number of rounds.
        `print_text`: prints a progress line.
        path: file of the lines, which a restarted server continues; None: in memory.
        names_clients: whether records may name the clients of a round.
        made: versions in the journal; None: all versions in the file.
    """

    def __init__(
        self,
        planned: int,
        print_text: Line,
        path: Path | None = None,
        *,
        names_clients: bool = True,
        made: int | None = None,
    ) -> None:
        self._planned, self._print, self._path, self._names_clients = planned, print_text, path, names_clients
        self._lock = threading.Lock()  # one thread makes rounds, another evaluates them
        found = _read(path) if path is not None and path.is_file() else {}
        self._records = {version: each for version, each in found.items() if made is None or version <= made}
        self._bytes_before, self._began = (0, 0), monotonic()

    @property
    def rounds(self) -> list[RoundRecord]:
        with self._lock:
            return [self._records[version] for version in sorted(self._records)]

    def round_made(self, committed: Committed, present: int, traffic: tuple[int, int]) -> RoundRecord:
        """Make the record of a new version. traffic: total bytes up and down so far."""
        now = monotonic()
        up, down = (here - before for here, before in zip(traffic, self._bytes_before, strict=True))
        seconds = round(now - self._began, 3)
        self._bytes_before, self._began = traffic, now
        return RoundRecord.of(
            committed,
            names_clients=self._names_clients,
            seconds=seconds,
            present=present,
            up_bytes=up,
            down_bytes=down,
        )

    def write(self, record: RoundRecord) -> None:
        """Print a round's line and store its record. Raises OSError if it cannot be written."""
        self._print(line(record, self._planned))
        self.keep(record)

    def keep(self, record: RoundRecord) -> None:
        """Store a record, and replace an earlier one of this version. Raises OSError if it cannot be written."""
        with self._lock:
            if self._records.get(record.version) == record:
                return
            self._records[record.version] = record
            if self._path is None:
                return
            with self._path.open("a") as file:
                file.write("\n" + json.dumps(record.as_json(), allow_nan=False))  # the last line may be incomplete

    def record(self, path: Path, **about: Any) -> None:
        """Write all rounds as JSON. about: of the federation. Raises CheckpointError if it cannot be written."""
        replace_file(path, json.dumps(record_of(self.rounds, **about), indent=1, allow_nan=False) + "\n")


def line(record: RoundRecord, planned: int) -> str:
    """The progress line of a round."""
    parts = [
        f"round {record.version}/{planned}",
        f"{record.seconds:.1f} s",
        f"{record.counted} of {record.present} devices",
        *([f"{record.refused_count} refused"] if record.refused_count else []),
        f"up {bytes_text(record.up_bytes)}",
        f"down {bytes_text(record.down_bytes)}",
        *([] if record.epsilon is None else [f"epsilon {record.epsilon:.4g}"]),
        *(f"{key} {value:.4g}" for key, value in (record.metrics or record.train_metrics).items()),
    ]
    return "  ".join(parts)


def _read(path: Path) -> dict[int, RoundRecord]:
    """Read the records, by version. Incomplete lines are ignored; the later of two lines of a version counts."""
    found: dict[int, RoundRecord] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            record = RoundRecord.read(read_json(text))
        except (ValueError, msgspec.ValidationError):
            continue
        found[record.version] = record
    return found


FIRST_SECONDS, EVERY_SECONDS = 5.0, 60.0  # of waiting before the first line, and before it is repeated


class Gathering:
    """Prints how many devices the server waits for. `look` is called often, by one thread."""

    def __init__(self, rounds: Rounds, print_text: Line, gather_seconds: float = inf) -> None:
        self._rounds, self._print, self._gather_seconds = rounds, print_text, gather_seconds
        self._since = self._reported_at = inf
        self._last_line = ""

    def look(self, moment: float | None = None) -> None:
        """moment: seconds of a monotonic clock."""
        now = monotonic() if moment is None else moment
        text = self._text()
        if not text:
            self._since = self._reported_at = inf
            self._last_line = ""
            return
        self._since = min(self._since, now)
        is_new = text != self._last_line and now >= self._since + FIRST_SECONDS
        if is_new or now >= self._reported_at + EVERY_SECONDS:
            self._print(text)
            self._last_line, self._reported_at = text, now

    def _text(self) -> str:
        found = None if self._rounds.finished else self._rounds.gathered
        if found is None or found.here >= found.wanted:
            return ""
        patience = ""
        if self._gather_seconds < inf and found.wanted > 1:
            patience = f"; after {self._gather_seconds:g} s {found.then} those that are"
        return f"{found.here} of {found.wanted} {found.of} are here{patience}"
