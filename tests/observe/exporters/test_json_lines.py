from __future__ import annotations

import json
from pathlib import Path

from support.exporting import MANY, ODD, ODD_POINT

from gossamer.observe.exporters.json_lines import JsonLinesWriter
from gossamer.observe.exporters.points import Point


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def lines(path: Path) -> list[object]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_point_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path, rank=3)
    writer.write([ODD_POINT, Point(1.7e9 + 0.25, 301, MANY)])
    writer.close()
    finite = {**ODD, "nan": None, "inf": None, "-inf": None}
    assert lines(path) == [
        {"at": 1.7e9, "rank": 3, "step": 300, "values": finite},
        {"at": 1.7e9 + 0.25, "rank": 3, "step": 301, "values": MANY},
    ]


def test_a_line_that_was_torn_ends_where_the_next_begins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"at": 1, "ra')
    writer = JsonLinesWriter(path, rank=0)
    writer.write([Point(2.0, 1, {"loss": 1.0})])
    writer.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"at": 1, "ra'
    assert json.loads(whole)["values"] == {"loss": 1.0}
