from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.base.tracing.record_format import CLOCK_MARK, OPERATORS_SUFFIX
from gossamer.errors import GossamerError
from gossamer.observe.trace.torch_operators import Operator, read_operators


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", ph: str = "X") -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": name, "pid": 7, "tid": 8, "ts": ts, "dur": dur}


def written(folder: Path, *events: dict[str, Any]) -> Path:
    spans = folder / "trace-0-1-abc.spans"
    spans.with_suffix(OPERATORS_SUFFIX).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return spans


MARK = event(f"{CLOCK_MARK}100.5", 4e12, 3.0, "user_annotation")


def test_the_mark_places_them_on_the_process_clock(tmp_path: Path) -> None:
    far = event("python", 4e12, 9.0, "python_function")
    spans = written(tmp_path, MARK, far, event("aten::mm", 4e12 + 2e6, 1e6), event("x", 4e12, 1.0, ph="i"))
    assert read_operators(spans) == {"torch 7/8": [Operator("aten::mm", "cpu_op", 102.5, 103.5)]}


def test_the_promptest_mark_counts(tmp_path: Path) -> None:
    """A thread that had to wait for a core began its mark late: by it, all operators would lie too early."""
    late = event(f"{CLOCK_MARK}101.5", 4e12 + 1.3e6, 3.0, "user_annotation")
    spans = written(tmp_path, late, MARK, event("aten::mm", 4e12 + 2e6, 1e6))
    assert read_operators(spans) == {"torch 7/8": [Operator("aten::mm", "cpu_op", 102.5, 103.5)]}


def test_an_inner_slice_outlasts_its_outer_one_by_no_rounding(tmp_path: Path) -> None:
    spans = written(tmp_path, MARK, event("outer", 4e12, 10.0), event("inner", 4e12 + 5, 5.001))
    outer, inner = read_operators(spans)["torch 7/8"]
    assert inner.end == outer.end


def test_what_is_none_is_refused_by_name(tmp_path: Path) -> None:
    assert read_operators(tmp_path / "trace-1-2-abc.spans") == {}
    spans = written(tmp_path, event("aten::mm", 4e12, 1.0))  # without a mark
    path = spans.with_suffix(OPERATORS_SUFFIX)
    whole = path.read_bytes()
    for content in (whole, whole[:-10], b"", b"text", gzip.compress(b"[]"), gzip.compress(b'{"traceEvents": [3]}')):
        path.write_bytes(content)
        with pytest.raises(GossamerError, match="Delete it"):
            read_operators(spans)
