import os
import re
from dataclasses import replace

from support.rehearsals import record

from gossamer.plan.estimate.step_time import StepTimeEstimate
from gossamer.plan.rehearse.model_shapes import Gradient, Shapes
from gossamer.plan.rehearse.report import RehearsalPlan, RehearsalRow, summary


def row(
    recipe: str, busy_seconds: float = 0.0, late_seconds: float = 0.0, estimate: StepTimeEstimate | None = None
) -> RehearsalRow:
    return RehearsalRow(recipe=recipe, record=record(busy_seconds, late_seconds), estimate=estimate)


def lines(*rows: RehearsalRow) -> list[str]:
    shapes = Shapes("a model", (Gradient("a", (5,), 1.0),))
    plan = RehearsalPlan(shapes=shapes, step_seconds=0.1, forward_share=0.3, workers=4, network="1gbit,1ms", steps=30)
    return list(summary(plan, rows))


def test_the_table_says_what_was_measured():
    estimate = StepTimeEstimate(
        step_seconds=0.19, waiting_seconds=0.04, wire_seconds=0.02, codec_seconds=0.01, inputs={}
    )
    said = lines(row("Dense()", estimate=estimate), row("Int8()"))
    assert said[3] == "workers   4, network 1gbit,1ms (emulated: switch)"
    assert re.split(" {2,}", said[5])[:6] == ["recipe", "step", "estimate", "ratio", "waiting", "encode"]
    numbers = ["2.00", "25 %", "10 ms", "20 ms", "3 ms", "1.2 MB"]
    assert re.split(" {2,}", said[6]) == ["Dense()", "200 ms", "190 ms", *numbers]
    assert re.split(" {2,}", said[7]) == ["Int8()", "200 ms", "-", *numbers]
    assert len({len(line) for line in said[5:8]}) == 1


def test_rows_that_this_machine_slowed_are_named(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    said = [line for line in lines(row("Fine", 0.04), row("Busy", 0.06), row("Late", 0.0, 0.003)) if "too few" in line]
    assert [line.split()[1] for line in said] == ["Busy", "Late"]
    assert "kept 1.20 busy" in said[0]
    assert "3 ms late" in said[1]


def test_a_step_is_a_backward_pass_for_every_recipe():
    """An exchange of four passes takes four times as long as one of them, and is no slower for it."""
    estimate = StepTimeEstimate(
        step_seconds=0.2, waiting_seconds=0.04, wire_seconds=0.02, codec_seconds=0.01, inputs={}
    )
    four = replace(row("EveryStep(accumulate=4)", estimate=estimate), passes=4)
    assert (four.seconds_per_step, four.estimated_seconds, four.bytes_sent) == (0.05, 0.05, 300_000)
    assert four.comm_seconds == [0.0025, 0.005, 0.00075]
