"""Charts: where things lie."""

from __future__ import annotations

import re

import pytest

from gossamer.plan.advise.charts import Axis, ChartLine, Dot, axis_around, dot_chart, front, line_chart


def _dot(label: str, across: float, up: float) -> Dot:
    return Dot(label=label, name=label, style="s0", across=across, up=up, low=up - 1, high=up + 1)


def test_the_front_is_what_none_beats_in_both() -> None:
    dots = [_dot("a", 1, 5), _dot("b", 2, 3), _dot("c", 2, 4), _dot("d", 3, 3), _dot("e", 4, 1)]
    assert [dot.label for dot in front(dots)] == ["a", "b", "e"]


@pytest.mark.parametrize(("value", "share"), [(1.0, 0.0), (10.0, 0.5), (100.0, 1.0)])
def test_a_logarithmic_axis(value: float, share: float) -> None:
    assert Axis(title="", low=1.0, high=100.0, logarithmic=True).share(value) == pytest.approx(share)


def test_ticks_of_a_logarithmic_axis() -> None:
    assert Axis(title="", low=0.15, high=3.0, logarithmic=True).ticks(9) == pytest.approx([0.2, 0.5, 1.0, 2.0])
    assert Axis(title="", low=1.0, high=1e6, logarithmic=True).ticks(9) == pytest.approx([10.0**n for n in range(7)])


def test_an_axis_around_one_value_or_none_has_room() -> None:
    for values in ([2.0], [0.0], [], [float("inf")]):
        axis = axis_around("", values)
        assert axis.low < axis.high
    assert axis_around("", [3.0, -1.0, 0.0], logarithmic=True).low > 0


def test_every_chart_is_drawn_broad_and_narrow() -> None:
    line = ChartLine(name="<A>", style="s0", across=[0.0, 10.0], up=[1.0, 0.0])
    axes = Axis(title="x", low=0.0, high=10.0), Axis(title="y", low=0.0, high=1.0)
    for chart in (line_chart([line], *axes, "t"), dot_chart([_dot("1", 5.0, 0.5)], *axes, "t")):
        assert re.findall(r'class="(broad|narrow)"', chart) == ["broad", "narrow"]
    assert "&lt;A&gt;" in line_chart([line], *axes, "t")


def test_points_lie_within_the_picture() -> None:
    line = ChartLine(name="A", style="s0", across=[0.0, 10.0], up=[-50.0, 50.0])
    chart = line_chart([line], Axis(title="x", low=0.0, high=10.0), Axis(title="y", low=0.0, high=1.0), "t")
    heights = [float(y) for points in re.findall(r'points="([^"]+)"', chart) for y in re.findall(r",([\d.]+)", points)]
    assert min(heights) >= 12
    assert max(heights) <= 340
