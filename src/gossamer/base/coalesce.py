"""Coalescing: many scripts run as one, and in each round their operations of the same kind travel together."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

from gossamer.base.ops import Coalesced, CollectiveOp, Script, Split

CoalescedScript = Generator[CollectiveOp, Any, list[Any]]


def coalesce(scripts: Sequence[Script]) -> CoalescedScript:
    """Advance many scripts together; returns their results in order.

    Two hundred small tensors then cost as many messages as one, and different kinds of operations do not wait for each
    other. An operation that is alone of its kind in a round travels as it is, without a copy.
    """
    results: list[Any] = [None] * len(scripts)
    asking: dict[int, CollectiveOp] = {}

    def advance(place: int, answer: Any) -> None:
        try:
            asking[place] = scripts[place].send(answer)
        except StopIteration as stop:
            results[place] = stop.value

    for place in range(len(scripts)):
        advance(place, None)
    while asking:
        together: dict[tuple[Hashable, ...], list[int]] = {}
        for place in sorted(asking):
            together.setdefault(asking[place].coalescing_key(), []).append(place)
        ops, asking = asking, {}
        joined = [_join([ops[place] for place in places]) for places in together.values()]
        answers = (yield Coalesced(tuple(op for op, _ in joined))) if len(joined) > 1 else [(yield joined[0][0])]
        parts = {
            place: part
            for places, (_, split), answer in zip(together.values(), joined, answers, strict=True)
            for place, part in zip(places, split(answer), strict=True)
        }
        del answers
        for place in sorted(parts):
            advance(place, parts.pop(place))  # drops the last reference to an answer
    return results


def _join(ops: Sequence[Any]) -> tuple[Any, Split]:
    """One operation that asks for all of them, and how its answer is split again."""
    return ops[0].join(ops) if len(ops) > 1 else (ops[0], lambda answer: [answer])
