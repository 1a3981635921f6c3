"""Schedule functions: two schedulers have the same text exactly where their functions return the same factors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, MultiplicativeLR, SequentialLR

from gossamer.errors import MismatchError
from gossamer.train.session.tracked_parts import explained, functions_text, refuse_other_functions


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)


def cosine(step: int, *, length: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / length)))


def stairs(step: int, *, length: int) -> float:
    return float(0.1 ** (step // length))


def table(step: int, *, length: int) -> float:
    return [1.0, 0.5, 0.25, *[0.1] * length][step]


def chained(rule: Any) -> LRScheduler:
    made = optimizer()
    return SequentialLR(made, [CosineAnnealingLR(made, 5), LambdaLR(made, rule)], milestones=[3])


SHAPES: list[Callable[..., float]] = [cosine, stairs, table]
KINDS: list[Callable[[Any], Any]] = [
    lambda rule: LambdaLR(optimizer(), rule),
    lambda rule: MultiplicativeLR(optimizer(), rule),
    chained,
    lambda rule: SimpleNamespace(scheduler=LambdaLR(optimizer(), rule)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [3, 600, 61_000])
def test_functions_with_another_length_have_another_text(kind: Any, shape: Any, length: int) -> None:
    def text(length: int) -> str:
        return functions_text(kind(functools.partial(shape, length=length)))

    assert text(length) == text(length) != ""
    assert text(length) != text(length + math.ceil(length / 50))
    assert functions_text(kind(lambda step: shape(step, length=length))) == text(length)


@pytest.mark.parametrize("scheduler", [CosineAnnealingLR(optimizer(), 5), object(), SimpleNamespace(lr_lambdas=())])
def test_a_scheduler_without_functions_has_no_text(scheduler: Any) -> None:
    assert functions_text(scheduler) == ""
    refuse_other_functions("scheduler", scheduler, {})


def test_a_refusal_names_factors_of_both_and_what_to_write() -> None:
    mine, theirs = (LambdaLR(optimizer(), functools.partial(cosine, length=length)) for length in (420, 600))
    others = {"functions of warmup": functions_text(theirs)}
    refuse_other_functions("warmup", theirs, others)
    with pytest.raises(MismatchError, match=r"warmup return factors 0\.99998\d* at step 1.*total = 10_000"):
        refuse_other_functions("warmup", mine, others)
    with pytest.raises(MismatchError, match="and nothing on the workers"):
        refuse_other_functions("other", mine, others)


@pytest.mark.parametrize("adds", [True, False])
def test_what_to_write_is_added_to_refusals_about_functions_alone(adds: bool) -> None:
    with pytest.raises(MismatchError) as refusal, explained():
        raise MismatchError("They differ in functions of scheduler" if adds else "They differ in torch")
    assert ("len(loader)" in str(refusal.value)) == adds
