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
    replies: dict[int, Any] = dict.fromkeys(range(len(scripts)))  # by script; a script is started with None
    while True:
        groups: dict[tuple[Hashable, ...], tuple[list[int], list[Any]]] = {}  # scripts and their operations, by kind
        for place in sorted(replies):
            try:
                op = scripts[place].send(replies.pop(place))  # drops the last reference to an answer
            except StopIteration as stop:
                results[place] = stop.value
            else:
                places, ops = groups.setdefault(op.coalescing_key(), ([], []))
                places.append(place)
                ops.append(op)
        if not groups:
            return results
        joint: list[Any] = []
        splits: list[Split | None] = []
        for _, ops in groups.values():
            op, split = ops[0].join(ops) if len(ops) > 1 else (ops[0], None)
            joint.append(op)
            splits.append(split)
        answers = [(yield joint[0])] if len(joint) == 1 else (yield Coalesced(tuple(joint)))
        for (places, _), split, answer in zip(groups.values(), splits, answers, strict=True):
            for place, part in zip(places, [answer] if split is None else split(answer), strict=True):
                replies[place] = part
        del answers, answer, part
