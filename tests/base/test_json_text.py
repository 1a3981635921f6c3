from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gossamer.base.json_text import DEEPEST_LEVELS, checked_line, json_text, read_checked_lines, read_json


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("value", [None, 3, "text", [], {"a": [1, {"b": ']}\\"'}]}, [[1]] * 1000])
def test_what_json_writes_is_read(value: Any) -> None:
    assert read_json(json.dumps(value)) == read_json(json.dumps(value).encode()) == value


def test_brackets_in_text_are_no_levels() -> None:
    value = ["[" * 1000, '"[{\\' * 1000]
    assert read_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", [nested(DEEPEST_LEVELS + 1), "[" * 100_000, '{"a":' * 100_000, '"[' * 100_000])
def test_deep_text_is_refused_before_it_is_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the stack a finalizer of something else would fail as well."""
    assert read_json(nested(DEEPEST_LEVELS)) is not None
    monkeypatch.delattr(json, "loads")
    with pytest.raises(ValueError, match="levels deep"):
        read_json(text)


@pytest.mark.parametrize("text", ["", "[", "{]", b"\xff\xfe", '"', "[1,]"])
def test_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|decode|Unterminated|Illegal|delimiter"):
        read_json(text)


def test_numbers_that_json_lacks_are_written_as_null() -> None:
    value = {"a": [1.5, float("nan")], "b": (float("inf"), {"c": -float("inf")}), "d": 1e308}
    assert json.loads(json_text(value), parse_constant=pytest.fail) == {
        "a": [1.5, None],
        "b": [None, {"c": None}],
        "d": 1e308,
    }
    assert json_text({"a": [1]}) == json.dumps({"a": [1]})


def test_lines_of_a_log_are_read_up_to_an_incomplete_one() -> None:
    values = [{"a": "\n\u00b5"}, [1, 2], None]
    lines = [checked_line(value) for value in values]
    content, ends = b"".join(lines), [sum(map(len, lines[: count + 1])) for count in range(len(lines))]
    for cut in range(len(content) + 1):
        complete = sum(end <= cut for end in ends)
        assert list(read_checked_lines(content[:cut])) == list(zip(values, ends, strict=True))[:complete]


@pytest.mark.parametrize(
    "damage", [lambda line: b"0" + line[1:], lambda line: line.replace(b"2", b"3"), lambda _: b"\n"]
)
def test_a_damaged_line_of_a_log_is_an_error_after_those_before_it(damage: Callable[[bytes], bytes]) -> None:
    first, second = checked_line([1]), checked_line([2])
    lines = read_checked_lines(first + damage(second))
    assert next(lines) == ([1], len(first))
    with pytest.raises(ValueError, match="checksum"):
        next(lines)
