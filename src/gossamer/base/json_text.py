"""JSON text: parses untrusted text with limited nesting, and writes standard JSON without NaN and infinity; lines of
logs, with checksums.

The standard library's parser recurses until the interpreter's stack is exhausted. A clear error is then impossible: any
code that runs next fails as well, including unrelated finalizers.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from math import isfinite
from typing import Any

DEEPEST_LEVELS = 200
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


def read_json(text: str | bytes | bytearray) -> Any:
    """The value that `text` writes, UTF-8 where it is bytes.

    Raises ValueError for invalid JSON, and for lists and objects more than `DEEPEST_LEVELS` within each other.
    """
    if not isinstance(text, str):
        text = text.decode("utf-8")
    if (levels := nesting(text)) > DEEPEST_LEVELS:
        raise ValueError(f"it nests {levels} levels deep, and no more than {DEEPEST_LEVELS} are read")
    return json.loads(text)


def nesting(text: str) -> int:
    """How many brackets and braces are open at once, at most. Those within double quotes do not count."""
    opening = text.count("[") + text.count("{")
    if opening <= DEEPEST_LEVELS:
        return opening  # no more than this, without looking at each
    level = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        mark = match[0]
        if mark in "[{":
            level += 1
            deepest = max(deepest, level)
        elif mark in "]}":
            level -= 1
    return deepest


def json_text(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON, with null for each number that is not finite: JSON has neither NaN nor Infinity."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not isfinite(value):
            return None
        case _:
            return value


def checked_line(value: Any) -> bytes:
    """A line of a log: the CRC-32 of the value's JSON, and the JSON."""
    text = json.dumps(value).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_checked_lines(content: bytes) -> Iterator[tuple[Any, int]]:
    """Yield the value of each `checked_line`, with the offset of the line's end. A last line without end is left out.

    Raises ValueError for a damaged line.
    """
    begin = 0
    while (end := content.find(b"\n", begin)) >= 0:
        checksum, _, text = content[begin:end].partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise ValueError(f"the line at byte {begin} has another checksum")
        begin = end + 1
        yield read_json(text), begin
