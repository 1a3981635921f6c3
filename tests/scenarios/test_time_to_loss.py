"""Time to a loss: where a curve is first as low, and whose runs are compared."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.time_to_loss import NO_LIMIT, Curves, steps_to, table

pytestmark = pytest.mark.nightly

FALLING = [(100, 0.0, 3.0), (200, 0.0, 2.0), (300, 0.0, 2.4), (400, 0.0, 1.5)]


@pytest.mark.parametrize(("loss", "steps"), [(3.5, 100), (3.0, 100), (2.5, 150), (2.0, 200), (1.95, 350), (1.5, 400)])
def test_a_loss_is_reached_where_the_curve_first_crosses_it(loss: float, steps: float) -> None:
    assert steps_to(loss, FALLING) == pytest.approx(steps)


def test_a_loss_that_is_never_reached_has_no_step() -> None:
    assert steps_to(1.4, FALLING) is None
    assert steps_to(1.4, [(100, 0.0, 3.0), (200, 0.0, None), (300, 0.0, 1.0)]) is None, "it has diverged"


def run(recipe: str, rate: float, seed: int, *losses: float, task: str = "bytelm-base") -> dict[str, Any]:
    curve = [(100 * number, 0.0, loss) for number, loss in enumerate(losses, start=1)]
    return {
        "task": task, "recipe": recipe, "learning_rate": rate, "seed": seed, "curve": curve, "held_out": losses[-1]
    }  # fmt: skip


RUNS = [
    run("Dense()", 1e-3, 0, 4.0, 3.0),
    run("Dense()", 3e-3, 0, 4.0, 2.0),
    run("Dense()", 3e-3, 1, 4.0, 3.0),
    run("Float4()", 3e-3, 0, 3.0, 1.0),
    run("Float4()", 3e-3, 1, 4.0, 2.0),
    run("Float4()", 3e-3, 2, 0.0, 0.0),
    run("OneBit()", 3e-3, 0, 4.0, 2.5),
    run("OneBit()", 3e-3, 0, 0.0, 0.0, task="bytelm"),
]


def test_runs_are_compared_seed_by_seed_at_the_best_rate() -> None:
    losses = Curves.of(RUNS, "bytelm-base")
    assert losses.steps("Float4()") == [150, 150], "a seed without Dense() says nothing"
    assert losses.steps("OneBit()") == [None], "another task's run is none of this one's"
    assert losses.dense_steps() == 200


def test_time_is_steps_times_their_length() -> None:
    text = table({NO_LIMIT: [0.1], "Float4()": [0.2, 0.1, 0.4], "OneBit()": [0.1]}, Curves.of(RUNS, "bytelm-base"))
    plain, ours, never = text.splitlines()[2:]
    assert "**1.00**" in plain
    assert "**1.50**" in ours
    assert "200 ms (100 to 400)" in ours
    assert "not within 200 (of 1: 1)" in never
