"""Comparison of run records, from literals."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from gossamer.events import Attached, Logged, StepEnded
from gossamer.observe.comparison import Prices, compare, final_loss, loss_at, seconds_to, value_until
from gossamer.observe.target import Target, TargetWatch, read_target


def record(recipe: str, step: float, steps: int, sent: float, losses: list[float], **metrics: Any) -> dict[str, Any]:
    points = [[i + 1, (i + 1) * step, loss] for i, loss in enumerate(losses)]
    return {
        "recipe": recipe,
        "workers": 4,
        "steps": steps,
        "seconds": steps * step,
        "seconds_per_step": {"median": step, "p90": step},
        "compute_seconds_per_step": 0.75 * step,
        "waiting_seconds_per_step": 0.25 * step,
        "bytes_sent_per_step": {"accounted": sent, "interface": None},
        "metrics": {"loss": points, **metrics},
    }


SLOW = record("Dense()", 2.0, 4, 1e9, [4.0, 3.0, 2.0, 1.0])
FAST = record("TopK(density=0.01)", 0.5, 20, 1e7, [4 - 0.15 * i for i in range(20)])


def test_the_rate_that_hides_a_step_sends_its_bytes_while_it_computes() -> None:
    slow, fast = compare([SLOW, FAST]).rows
    assert slow.bits_per_second_to_hide == 8 * 1e9 / 1.5
    assert fast.bits_per_second_to_hide == 8 * 1e7 / 0.375
    idle = {**SLOW, "compute_seconds_per_step": 0.0}
    assert compare([idle]).rows[0].bits_per_second_to_hide is None


def test_a_loss_is_infinite_from_where_it_was_not_finite() -> None:
    diverged = record("Int8()", 0.5, 3, 1.0, [3.0, 2.0, None])
    assert loss_at(diverged, "loss", 2) == 2.5
    assert loss_at(diverged, "loss", 3) == final_loss(diverged) == inf
    assert final_loss(SLOW) == 2.5


def test_rows() -> None:
    found = compare([SLOW, FAST], unlimited=record("Dense()", 0.4, 9, 1e9, [1.0]), target=read_target("loss<2.5"))
    slow, fast = found.rows
    assert (found.metric, found.equal_seconds, found.equal_steps) == ("loss", 8.0, 4)
    assert (slow.step_ratio, fast.step_ratio) == (1.0, 0.25)
    assert (slow.unlimited_ratio, fast.unlimited_ratio) == (pytest.approx(5.0), pytest.approx(1.25))
    assert slow.waiting_share == fast.waiting_share == 0.25
    assert slow.loss_at_equal_steps == pytest.approx(2.5)  # the mean of the four it logged
    assert fast.loss_at_equal_time == pytest.approx(sum(4 - 0.15 * i for i in range(6, 16)) / 10)
    assert slow.seconds_to_target == 6.0
    assert fast.seconds_to_target == 6.0  # 4 - 0.15 * 10 is not below 2.5; the next one is
    assert slow.money is fast.money is None


def test_validation_loss_is_taken_as_it_is_and_wins() -> None:
    seen = [[2, 1.0, 3.0], [4, 2.0, 2.0], [9, 4.5, 1.0]]
    assert compare([record("Int8()", 0.5, 10, 1.0, [1.0], validation_loss=seen)]).rows[0].loss_at_equal_steps == 1.0
    assert value_until({"metrics": {"validation_loss": seen}}, "validation_loss", 0, 5) == 2.0
    assert value_until({"metrics": {"validation_loss": seen}}, "validation_loss", 1, 0.5) is None


def test_a_validation_at_the_end_alone_leaves_the_training_loss_to_compare() -> None:
    fast, slow = (
        record("Int8()", step, 10, 1.0, [3.0] * 10, validation_loss=[[10, 10 * step, 1.0]]) for step in (0.5, 2.0)
    )
    found = compare([fast, slow])
    assert (found.metric, [row.loss_at_equal_time for row in found.rows]) == ("loss", [3.0, 3.0])
    assert compare([fast, fast]).metric == "validation_loss"
    unlogged = slow | {"metrics": {"validation_loss": [[10, 20.0, 1.0]]}}
    assert compare([fast, unlogged]).metric == "validation_loss"  # there is no other


def test_money() -> None:
    prices = Prices(per_hour=9.0, per_gigabyte=0.1)
    (row,) = compare([SLOW], prices=prices).rows
    assert row.money == pytest.approx(4 * 9.0 * 8 / 3600 + 0.1 * 4 * 4 * 1.0)


def test_a_script_that_logs_no_loss() -> None:
    found = compare([record("Int8()", 0.5, 10, 1.0, []) | {"metrics": {}}])
    assert found.metric is None
    assert found.rows[0].loss_at_equal_time is None


@pytest.mark.parametrize("text", ["validation_loss", "loss<", "2.2<loss", "loss<2.2 and loss>1", "__import__('os')<1"])
def test_no_target(text: str) -> None:
    with pytest.raises(ValueError, match=r"validation_loss<2\.2"):
        read_target(text)


def test_targets() -> None:
    assert read_target(" accuracy > 0.9 ") == Target("accuracy", False, 0.9)
    assert seconds_to(SLOW, read_target("loss<0.5")) is None


def step(moment: float) -> StepEnded:
    return StepEnded(moment=moment, step=1, seconds=1.0)


def test_a_watch_says_so_once() -> None:
    said: list[str] = []
    watch = TargetWatch(read_target("loss<1"), 10.0, lambda: said.append("enough"))
    watch(Attached(moment=5.0, recipe="", layouts=(), parameters=0, buffer_bytes=0, control_bytes=0, rank=0, world=1))
    watch(step(14.0))
    watch(Logged(step=1, values={"loss": 1.0, "other": 0.0}))
    assert said == []
    watch(Logged(step=2, values={"loss": 0.9}))
    watch(step(99.0))
    assert said == ["enough"]


def test_huge_losses_are_compared() -> None:
    row = compare([record("Dense()", 1.0, 4, 1e9, [1e308] * 4)]).rows[0]
    assert row.loss_at_equal_time == 1e308
