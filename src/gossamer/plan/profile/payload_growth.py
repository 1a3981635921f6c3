"""Payload growth: what decoding takes in a group too large to have all of its payloads decoded here.

A few payloads are decoded, and a few more; what each further byte takes is multiplied by the bytes that a worker of the
whole group hears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.base.ops import AllGather, AllToAll, CollectiveOp, InGroup, payload_bytes

GROWS = 2  # times the bytes, where four times the workers are heard
FEW, MOST_DECODED = 4, 16  # workers whose payloads are decoded here


def heard_bytes(op: CollectiveOp, world: int) -> int:
    """Payload bytes that a worker hears of others and has to decode one by one; means come added up."""
    return sum(_heard(each, world) for each in op.concurrent())


def _heard(op: CollectiveOp, world: int) -> int:
    match op:
        case AllGather(payload):
            return world * payload_bytes(payload)
        case AllToAll(parts):
            return world * payload_bytes(parts[0])
        case InGroup(ranks, inner):
            return _heard(inner, len(ranks))
        case _:
            return 0


def grown(
    few: dict[str, Any], many: dict[str, Any], heard: Sequence[Sequence[int]], computing: str = "computing_seconds"
) -> dict[str, Any]:
    """A timing with `many` workers, for as many as hear what the last of `heard` says.

    few, many: seconds by the names in BucketProfile, of FEW and MOST_DECODED workers. heard: the bytes heard in each
    operation with so few workers, with so many, and with all. What follows an operation grows with them in a straight
    line, and never shrinks.
    """
    first, *after = zip(few[computing], many[computing], strict=True)
    seconds = [first[1]]
    for (less, more), (little, much, all_bytes) in zip(after, zip(*heard, strict=True), strict=True):
        grows = much >= GROWS * little  # parts of a reduce-scatter do not, but for their headers
        each = max(0.0, more - less) / (much - little) if grows and much > little else 0.0
        seconds.append(more + each * max(0, all_bytes - much))
    return many | {computing: seconds}
