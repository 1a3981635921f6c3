from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.virtual_traces import CLOCKS, Rounds

from gossamer.observe.trace.chrome import pack
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import build


def written(folder: Path) -> dict[str, Any]:
    Rounds(count=20).record(folder, CLOCKS)
    content: dict[str, Any] = json.loads(pack(build(read_run(folder))))
    return content


def test_torch_finds_it_valid(tmp_path: Path) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="torch's validator of traces")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(written(tmp_path)))
    assert validator.validate_trace(str(path)) == (True, [])


def check_events(events: list[dict[str, Any]]) -> None:
    """Every arrow has one beginning and one end, in this order, each within a slice of its track."""
    ends = {kind: {each["id"]: each for each in events if each["ph"] == kind} for kind in "sf"}
    assert ends["s"].keys() == ends["f"].keys() != set()
    assert Counter(each["ph"] for each in events)["s"] == len(ends["s"])
    for flow, sent in ends["s"].items():
        assert sent["ts"] <= ends["f"][flow]["ts"]
    for each in (*ends["s"].values(), *ends["f"].values()):
        assert any(
            one["ph"] == "X"
            and (one["pid"], one["tid"]) == (each["pid"], each["tid"])
            and one["ts"] <= each["ts"] < one["ts"] + one["dur"]
            for one in events
        )


def test_arrows_are_pairs_within_slices(tmp_path: Path) -> None:
    check_events(written(tmp_path)["traceEvents"])


def test_an_arrow_without_its_end_is_seen(tmp_path: Path) -> None:
    events = written(tmp_path)["traceEvents"]
    events.remove(next(each for each in events if each["ph"] == "f"))
    with pytest.raises(AssertionError):
        check_events(events)


def test_steps_are_named_as_torch_names_them(tmp_path: Path) -> None:
    content = written(tmp_path)
    steps = {each["name"] for each in content["traceEvents"] if each.get("cat") == "user_annotation"}
    assert {"ProfilerStep#1", "ProfilerStep#20", "forward"} <= steps
    told = content["otherData"]["clocks"]
    assert told["machine 0"]["error_seconds"] == 0
    assert 0 < told["machine 1"]["error_seconds"] < 0.02
