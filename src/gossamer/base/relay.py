"""Relay: passes a script's operations and answers on, each of its turns within a guard."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

Op = TypeVar("Op")
Result = TypeVar("Result")


def relayed(
    script: Generator[Op, Any, Result],
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
    answer: Any = None,
) -> Generator[Op, Any, Result]:
    """Go on with a script from `answer`, as `yield from` does, with every turn of its own within guard().

    Neither operations nor answers are kept alive here: they are as large as buckets.
    """
    asked, answers = [], [answer]
    del answer
    while True:
        with guard():
            try:
                asked.append(script.send(answers.pop()))
            except StopIteration as ended:
                return ended.value  # type: ignore[no-any-return]
        answers.append((yield asked.pop()))
