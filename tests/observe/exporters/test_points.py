from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from support.exporting import attached, logged, step

from gossamer.events import Event, GroupChanged
from gossamer.observe.exporters.points import CurveExporter, Point, unix_seconds


class Kept:
    """A tool that keeps all points."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.closed = False

    def write(self, points: Sequence[Point]) -> None:
        self.points += points

    def close(self) -> None:
        self.closed = True


def exported(*happened: Event) -> list[Point]:
    tool = Kept()
    exporter = CurveExporter(tool)
    for event in happened:
        exporter.take([event])
    exporter.close()
    assert tool.closed
    return tool.points


def test_metrics_are_points_as_the_user_named_them() -> None:
    (point,) = exported(logged(7, **{"train/loss": 0.5, "accuracy": 0.25}))
    assert (point.step, point.values) == (7, {"train/loss": 0.5, "accuracy": 0.25})


def test_short_steps_are_one_point_a_second_with_their_means() -> None:
    points = exported(*(step(number, seconds=0.25) for number in range(1, 11)))
    assert [point.step for point in points] == [1, 5, 9, 10]
    assert [point.values["gossamer/step_seconds"] for point in points] == [0.25] * 4
    assert points[1].values["gossamer/bytes_sent"] == 4e6


def test_means_are_of_the_steps_since_the_last_point() -> None:
    took = [0.5, 0.1, 0.3, 0.8]
    points = exported(*(step(n, each, moment=sum(took[:n])) for n, each in enumerate(took, start=1)))
    assert [point.values["gossamer/step_seconds"] for point in points] == [0.5, pytest.approx(0.4)]


def test_long_steps_are_a_point_each_and_skipped_ones_are_counted() -> None:
    points = exported(*(step(number, seconds=2.0) for number in range(1, 4)))
    assert [point.step for point in points] == [1, 2, 3]
    assert points[0].values["gossamer/skipped_steps"] == 0


def test_the_number_of_workers_is_a_curve() -> None:
    change = GroupChanged(step=9, view=2, world=3, lost=(1,), joined=0, seconds=0.5, finished=True)
    assert [(p.step, p.values) for p in exported(attached(4), change)] == [
        (0, {"gossamer/workers": 4}), (9, {"gossamer/workers": 3}),
    ]  # fmt: skip


def test_moments_are_unix_seconds() -> None:
    assert unix_seconds(time.perf_counter()) == pytest.approx(time.time(), abs=1.0)
    assert unix_seconds(0.0) == pytest.approx(time.time() - time.perf_counter(), abs=1.0)
