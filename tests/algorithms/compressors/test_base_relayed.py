"""Relayed scripts: what they ask and return is what `yield from` passes on, and nothing of it is kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest

from gossamer.algorithms.compressors.base import relayed


class Large:
    """Something that can be seen to go."""


def script() -> Generator[Any, Any, int]:
    total = 0
    for place in range(3):
        total += yield place
    return total


def plain(inner: Generator[Any, Any, int]) -> Generator[Any, Any, int]:
    return (yield from inner)


def keeping(inner: Generator[Any, Any, int]) -> Generator[Any, Any, int]:
    """The twin: holds what is asked until it is answered, and what was answered until the next question."""
    answer = None
    while True:
        try:
            op = inner.send(answer)
        except StopIteration as ended:
            return int(ended.value)
        answer = yield op


def asked(relay: Callable[..., Any]) -> tuple[list[int], int]:
    run, ops, answer = relay(script()), [], None
    while True:
        try:
            ops.append(run.send(answer))
        except StopIteration as ended:
            return ops, ended.value
        answer = 10 + ops[-1]


def test_questions_answers_and_the_result_are_passed_on() -> None:
    assert asked(relayed) == asked(plain) == ([0, 1, 2], 33)


@pytest.mark.parametrize(("relay", "kept"), [(relayed, False), (plain, False), (keeping, True)])
def test_operations_are_not_kept_alive(relay: Callable[..., Any], kept: bool) -> None:
    def asks() -> Generator[Large, None, int]:
        yield Large()
        return 0

    run = relay(asks())
    op = weakref.ref(next(run))
    assert (op() is not None) == kept
