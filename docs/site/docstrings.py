"""An extension of griffe: docstrings as Markdown, with their equations and examples as blocks of code."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Class, Extension, Object

FORMULA = re.compile(r"^(?:law|bytes|source|memory): ", re.MULTILINE)
FIELDS = re.compile(r"^(?:Args|Attributes):$", re.MULTILINE)
COMMENT = re.compile(r"  # (.+)$")
EXAMPLE = re.compile(r"^Example:\n((?: {4}.*\n?|\n)+)", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """A docstring with its equations and examples as blocks of code."""
    text = EXAMPLE.sub(_example, docstring)
    parts = re.split(r"\n\n", text)
    return "\n\n".join(f"```text\n{part}\n```" if FORMULA.search(part) else part for part in parts)


def _example(found: re.Match[str]) -> str:
    code = textwrap.dedent(found[1]).strip("\n")
    language = "pycon" if code.startswith(">>>") else "python"
    return f"**Example**\n\n```{language}\n{code}\n```\n"


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            if isinstance(obj, Class) and not FIELDS.search(obj.docstring.value):
                obj.docstring.value += attributes(obj)
            obj.docstring.value = as_markdown(obj.docstring.value)


def attributes(record: Class) -> str:
    """A section of the public fields of a class, from the comments behind them."""
    fields = {name: each for name, each in record.members.items() if each.is_attribute and not name.startswith("_")}
    found = {name: COMMENT.search(each.lines[-1]) for name, each in fields.items() if each.lines}
    lines = [f"    {name}: {comment[1]}" for name, comment in found.items() if comment]
    return "\n\nAttributes:\n" + "\n".join(lines) if lines else ""
