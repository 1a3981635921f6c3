"""Schedule functions: describe the functions of a scheduler by their values, since its state_dict() holds none of them.

LambdaLR and MultiplicativeLR compute rates by functions of the user's. A worker that comes later is given the others'
state, and computes with functions of its own: where these depend on len(loader), they may be others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gossamer.errors import MismatchError

Function = Callable[[int], Any]

SHOWN = (1, 100, 10_000)  # steps whose values a message names
LARGEST_STEP = 10**7
REMEDY = (
    "A scheduler's state_dict() does not hold the functions of LambdaLR or MultiplicativeLR, so each worker has its "
    "own. Compute them from numbers that are the same whenever a worker comes, such as total = 10_000; or from "
    "len(loader) before gossamer.attach, where world.size is the size with which the run began."
)


def functions_text(scheduler: Any) -> str:
    """The values of all functions of a scheduler, and of those that it chains; "" where it has none."""
    found = list(_functions(scheduler))
    if not found:
        return ""
    shown = "; ".join(", ".join(f"{_value(each, step)} at step {step}" for step in SHOWN) for each in found)
    digest = hashlib.sha256()
    for function in found:
        digest.update(" ".join(_value(function, step) for step in _steps()).encode())
    return f"factors {shown}, in all {digest.hexdigest()[:8]}"


def refuse_other_functions(name: str, scheduler: Any, others: Mapping[str, str]) -> None:
    """Raise MismatchError for a newcomer's scheduler whose functions return other values than those of `others`.

    others: `functions_text` of the schedulers of workers that train already, by "functions of " and their names.
    """
    mine, theirs = functions_text(scheduler), others.get(f"functions of {name}", "")
    if mine != theirs:
        raise MismatchError(
            f"the functions of {name} return {mine or 'nothing'} on this worker and {theirs or 'nothing'} on the "
            f"workers that train already, so learning rates would differ, and this worker does not go on. {REMEDY}"
        )


@contextmanager
def explained() -> Iterator[None]:
    """Add to a refusal within the block what to do about functions, if these differ."""
    try:
        yield
    except MismatchError as refusal:
        if "functions of" in str(refusal):
            raise MismatchError(f"{refusal} {REMEDY}") from None
        raise


def _functions(scheduler: Any) -> Iterator[Function]:
    inner = getattr(scheduler, "scheduler", scheduler)  # AcceleratedScheduler and the like
    for each in getattr(inner, "_schedulers", ()):
        yield from _functions(each)
    seen: dict[int, Function] = {id(each): each for each in getattr(inner, "lr_lambdas", ()) if callable(each)}
    yield from seen.values()


def _steps() -> Iterator[int]:
    """All small steps, then one in a hundred of as many: a difference of one percent in a length is found."""
    step = 0
    while step <= LARGEST_STEP:
        yield step
        step += max(1, step // 100)


def _value(function: Function, step: int) -> str:
    try:
        return f"{float(function(step)):.9g}"
    except Exception as error:  # a table that ends, or no number
        return type(error).__name__
