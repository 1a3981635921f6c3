from __future__ import annotations

import gc
import json
import sys
import weakref
from typing import Any

import pytest

from gossamer.core.json_text import DEEPEST_LEVELS, read_json


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("value", [None, 3, "text", [], {"a": [1, {"b": ']}\\"'}]}, [[1]] * 1000])
def test_what_json_writes_is_read(value: Any) -> None:
    assert read_json(json.dumps(value)) == read_json(json.dumps(value).encode()) == value


def test_brackets_in_text_are_no_levels() -> None:
    value = ["[" * 1000, '"[{\\' * 1000]
    assert read_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", [nested(DEEPEST_LEVELS + 1), "[" * 100_000, '{"a":' * 100_000, '"[' * 100_000])
def test_deep_text_is_refused_before_it_is_parsed(text: str) -> None:
    assert read_json(nested(DEEPEST_LEVELS)) is not None
    with pytest.raises(ValueError, match="levels deep"):
        read_json(text)


def test_deep_text_leaves_the_stack_to_whatever_runs_next() -> None:
    """json.loads, at the end of the stack, fails a finalizer of something else; this does not."""
    failed: list[object] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, sorted, [3, 1, 2], key=lambda number: -number)

    def ignored(unraisable: object) -> None:
        failed.append(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, ignored
    threshold = gc.get_threshold()
    try:
        for _ in range(100):
            Cycle()
        gc.set_threshold(1)
        with pytest.raises(ValueError, match="levels deep"):
            read_json("[" * 100_000)
    finally:
        gc.set_threshold(*threshold)
        sys.unraisablehook = before
    assert not failed


@pytest.mark.parametrize("text", ["", "[", "{]", b"\xff\xfe", '"', "[1,]"])
def test_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|decode|Unterminated|Illegal|delimiter"):
        read_json(text)
