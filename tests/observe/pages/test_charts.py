"""Charts: where things lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from xml.etree import ElementTree

import pytest

from gossamer.observe.pages.charts import (
    LETTER,
    Axis,
    BarGroup,
    BarPart,
    ChartLine,
    Dot,
    axis_around,
    bar_chart,
    dot_chart,
    front,
    line_chart,
)


def _dot(label: str, across: float, up: float) -> Dot:
    return Dot(label=label, name=label, style="s0", across=across, up=up, low=up - 1, high=up + 1)


def bars(waiting: float = 5.0) -> str:
    work = BarPart(name="computing", style="compute", hatch="", length=20.0)
    wait = BarPart(name="waiting", style="waiting", hatch="///", length=waiting)
    groups = [BarGroup(name=name, style="s0", bars=[[work, wait], [wait]]) for name in ("a < b", "c")]
    return bar_chart(groups, "ms a step", "t", "ms")


def pictures(chart: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(f"<all>{chart}</all>"))


def boxes(picture: ElementTree.Element) -> Iterator[tuple[float, float, float, float]]:
    """Left, top, right and bottom of every text that is not turned."""
    for each in picture.iter("text"):
        if "transform" not in each.attrib:
            x, y, wide = float(each.attrib["x"]), float(each.attrib["y"]), LETTER * len(each.text or "")
            left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[each.attrib.get("text-anchor", "start")]
            yield left, y - 9.0, left + wide, y + 2.0


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def check_texts(chart: str) -> None:
    for picture in pictures(chart):
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        found = list(boxes(picture))
        for left, top, right, bottom in found:
            assert min(left, top) >= 0
            assert right <= width
            assert bottom <= height
        assert not [pair for pair in combinations(found, 2) if overlap(*pair)]


def labeled(ends: list[float]) -> str:
    lines = [
        ChartLine(name=f"line {place}", style=f"s{place}", across=[0.0, 10.0], up=[1.0, end], label="ABCD"[place])
        for place, end in enumerate(ends)
    ]
    return line_chart(lines, Axis(title="x", low=0.0, high=10.0), Axis(title="y", low=0.0, high=1.0), "t", whole=False)


def test_labels_of_curves_that_end_at_the_same_place_do_not_cover_each_other() -> None:
    chart = labeled([0.5, 0.5, 0.5, 0.0])
    check_texts(chart)
    for picture in pictures(chart):
        said = [each.text for each in picture.iter("text")]
        assert all(said.count(label) == 1 for label in "ABCD")


def test_labels_that_are_drawn_where_curves_end_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.observe.pages.charts.spread_apart", lambda wanted, *room: wanted)
    with pytest.raises(AssertionError):
        check_texts(labeled([0.5, 0.5]))


def test_bars_are_as_long_as_their_parts_and_are_named_where_there_is_room() -> None:
    check_texts(bars())
    for picture in pictures(bars()):
        wide = [float(each.attrib["width"]) for each in picture.findall("rect")]
        assert [each / wide[0] for each in wide] == pytest.approx(2 * [1, 0.25, 0.25], rel=0.01)
        fillings = [each.attrib["fill"] for each in picture.findall("rect")]
        kind = picture.attrib["class"]
        assert fillings == 2 * [f"url(#{kind}-compute)", f"url(#{kind}-waiting)", f"url(#{kind}-waiting)"]
        said = [each.text for each in picture.iter("text")]
        assert said.count("computing 20 ms") == 2
        assert {"a < b", "c"} <= set(said)
    assert "waiting 0.1" not in bars(waiting=0.1)


def test_every_filling_is_defined_in_the_picture_that_uses_it() -> None:
    """A filling of another picture draws nothing while that one is hidden."""
    for picture in pictures(bars()):
        defined = {f"url(#{each.attrib['id']})" for each in picture.iter("pattern")}
        assert {each.attrib["fill"] for each in picture.findall("rect")} == defined


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
    for chart in (line_chart([line], *axes, "t"), dot_chart([_dot("1", 5.0, 0.5)], *axes, "t"), bars()):
        assert re.findall(r'class="(broad|narrow)"', chart) == ["broad", "narrow"]
    assert "&lt;A&gt;" in line_chart([line], *axes, "t")


def test_points_lie_within_the_picture() -> None:
    line = ChartLine(name="A", style="s0", across=[0.0, 10.0], up=[-50.0, 50.0])
    chart = line_chart([line], Axis(title="x", low=0.0, high=10.0), Axis(title="y", low=0.0, high=1.0), "t")
    heights = [float(y) for points in re.findall(r'points="([^"]+)"', chart) for y in re.findall(r",([\d.]+)", points)]
    assert min(heights) >= 12
    assert max(heights) <= 340
