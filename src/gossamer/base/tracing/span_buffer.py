"""Span buffer: the spans of one thread that are not written yet, as one flat list of numbers.

Numbers in a list are nothing that the garbage collector follows, and one struct packs many records at once, in 0.06 us
each, where one at a time takes 0.14.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from gossamer.base.tracing.record_format import FIELDS, RECORD

Numbers = tuple[float, float, int, int, int, int, int, int]  # one span, in the order of FIELDS
MANY = 256
_MANY = Struct(f"<{RECORD.format.lstrip('<') * MANY}")
_WIDTH = len(FIELDS)


class SpanBuffer:
    """keep: appends one span, in one step that no other thread divides."""

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self.keep = self._numbers.extend

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    def take(self) -> Iterator[bytes]:
        """What was kept so far, in packs of MANY records at most; from another thread, while this one goes on."""
        count = len(self) * _WIDTH
        numbers = self._numbers[:count]
        del self._numbers[:count]
        at = 0
        while at + MANY * _WIDTH <= count:
            yield _MANY.pack(*numbers[at : at + MANY * _WIDTH])
            at += MANY * _WIDTH
        if at < count:
            yield b"".join(RECORD.pack(*numbers[each : each + _WIDTH]) for each in range(at, count, _WIDTH))
