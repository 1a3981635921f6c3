"""Silent: each worker trains as if it were alone, and nothing travels."""

from __future__ import annotations

import pytest
import torch
from support.resumed_training import check_resume
from support.training_loops import LR, START, Trace, close, gradient, run

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import RecipeError
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.train.session.recipe_choice import refuse_inelastic
from gossamer.train.traffic.traffic import estimate_traffic


def test_silent_equals_training_alone_on_each_workers_data() -> None:
    for rank, trace in enumerate(run("Silent()", 6)):
        x = START.clone()
        for step, reached in enumerate(trace.path):
            x -= LR * gradient(x, step, rank)
            close(reached, x)


def test_silent_workers_part_and_nothing_averages_them() -> None:
    traces = run("Silent()", 6)
    assert len({tuple(trace.path[-1].tolist()) for trace in traces}) == len(traces)
    for trace in traces:
        assert all(torch.equal(own, merged) for own, merged in zip(trace.path, trace.merged, strict=True))


def test_silent_counts_steps_and_sends_no_bytes() -> None:
    def sent(trace: Trace) -> tuple[int, float]:
        return trace.session.steps, trace.session.stats.run.bytes_sent

    for trace in run("Silent()", 6, note=sent):
        assert trace.notes == [(step, 0.0) for step in range(1, 7)]


def test_silent_is_estimated_to_send_nothing() -> None:
    recipe = resolve("Silent()", 4)
    found = estimate_traffic(recipe, assumed(1_000_000, recipe), workers=4)
    assert found.bytes_sent == 0
    assert found.residual_bytes == found.strategy_bytes == 0


@pytest.mark.parametrize("text", ["Silent() + Int8()", "Silent() + Ring()"])
def test_silent_refuses_terms_that_would_have_no_effect(text: str) -> None:
    with pytest.raises(RecipeError, match=r"Write Silent\(\) without"):
        resolve(text)


def test_silent_refuses_elastic_runs() -> None:
    with pytest.raises(gossamer.errors.AttachError, match="no common parameters"):
        refuse_inelastic(resolve("Silent()"))


def test_sessions_neither_enter_nor_leave_silent_training() -> None:
    def refused(trace: Trace) -> bool:
        with pytest.raises(RecipeError, match="do not communicate"):
            trace.session.switch("Dense()" if "Silent" in repr(trace.session.recipe) else "Silent()")
        return True

    for text in ("Dense()", "Silent()"):
        assert all(trace.notes == [True] for trace in run(text, 1, note=refused))


def test_silent_resumes_bit_for_bit() -> None:
    check_resume("Silent()", [4, 6])
