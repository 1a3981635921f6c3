"""JSON lines: one object a point, {"at": unix seconds, "rank": 0, "step": 12, "values": {"loss": 0.5}}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from gossamer.observe.exporters.points import Point
from gossamer.observe.exporters.whole_records import RecordsFile


class JsonLinesWriter:
    """Appends to the file. What is not finite is null there, since JSON has no number for it."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._file = RecordsFile(path)

    def write(self, points: Sequence[Point]) -> None:
        torn = self._file.bytes and not self._file.ends_with(b"\n")  # the process before was killed
        self._file.append(b"\n" * bool(torn) + b"".join(map(self._line, points)))

    def close(self) -> None:
        self._file.close()

    def _line(self, point: Point) -> bytes:
        values = {name: value if isfinite(value) else None for name, value in point.values.items()}
        told = {"at": round(point.at, 6), "rank": self._rank, "step": point.step, "values": values}
        return json.dumps(told).encode() + b"\n"
