"""Local steps: what counts as one, and what it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import Parameter

from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.report import unchanged
from gossamer.train.engine.torch_hooks import BackwardMonitor, LoopControls
from gossamer.train.synchronizers.local_step_counter import LocalStepCounter, StepPhase


class Loop:
    """One parameter, and everything that is reported."""

    def __init__(self, *, in_backward: bool = False) -> None:
        self.parameter, self.controls = Parameter(torch.ones(2)), LoopControls()
        self.counted, self.ended, self.judged = 0, list[Any](), list[Any]()
        state = SimpleNamespace(
            gradients=BackwardMonitor,
            agree=unchanged,
            ended=lambda *said: self.ended.append(said),
            judged=lambda *said: self.judged.append(said),
        )
        bucket = SimpleNamespace(parameters={"w": self.parameter})
        self.local = LocalStepCounter(
            self.controls, cast(LoopState, state), 3, [cast(Bucket, bucket)], self.count, in_backward=in_backward
        )

    def count(self) -> None:
        self.counted += 1

    def backward(self, factor: float = 1.0) -> None:
        (self.parameter * factor).sum().backward()


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("within", [0, 2])
def test_a_step_counts_once_however_many_passes_it_has(before: int, within: int) -> None:
    loop = Loop()
    for _ in range(before):
        loop.backward()
    loop.local.before_step(closure=within > 0)
    for _ in range(within):
        loop.backward()
    loop.local.after_step()
    assert (loop.counted, loop.local.phase) == (1, StepPhase.WAITING)


@pytest.mark.parametrize("muted", [False, True])
def test_muted_passes_do_not_count(muted: bool) -> None:
    loop = Loop(in_backward=True)
    loop.controls.muted = muted
    loop.backward()
    assert (loop.counted, loop.local.counted) == (not muted, not muted)


def test_the_weights_of_all_passes_of_a_step_add_up() -> None:
    loop = Loop()
    for weight in (2.0, 3.0):
        loop.controls.weight = weight
        loop.backward()
    assert loop.local.take_weight() == 5.0
    assert loop.local.take_weight() == 3.0  # a step without a pass of its own has the weight that was said last


def test_gradients_that_are_not_finite_are_dropped_and_the_step_reports_them_once() -> None:
    loop = Loop()
    loop.backward(torch.inf)
    loop.local.drop_nonfinite()
    loop.local.add(False, {"bytes_sent": 2})
    loop.local.add(False, {"bytes_sent": 3})
    loop.local.report()
    loop.local.report()
    assert loop.parameter.grad is None
    assert loop.judged == [("pass", (3, "w"))]
    assert loop.ended == [(True, {"waiting_seconds": 0.0, "bytes_sent": 5}), (False, {"waiting_seconds": 0.0})]
