from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest
from support.run_records import record

from gossamer.observe.panels import panels, step_bars
from gossamer.observe.svg import FONT, LETTER, bars_svg, panel_svg

NAMES = ["Dense()", "TopK(density=0.01)", "Int8()", "home", "a < b & c"]
RECORDS: list[dict[str, Any]] = [record(name) for name in NAMES]


def texts(svg: str) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Every text with its box: left, top, right, bottom."""
    for each in ElementTree.fromstring(svg).iter("text"):
        x, y, text = float(each.attrib["x"]), float(each.attrib["y"]), each.text or ""
        wide = LETTER * len(text)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[each.attrib["text-anchor"]]
        yield text, (left, y - 0.8 * FONT, left + wide, y + 0.2 * FONT)


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("svg", [*map(panel_svg, panels(RECORDS, "loss")), bars_svg(step_bars(RECORDS))])
def test_every_recipe_is_named_within_the_picture_and_no_text_covers_another(svg: str) -> None:
    found = list(texts(svg))
    said = [text for text, _ in found]
    assert all(said.count(name) == 1 for name in NAMES), "curves end at the same place"
    _, _, width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split())
    for _, (left, top, right, bottom) in found:
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= height
    assert [(a, b) for (a, one), (b, other) in combinations(found, 2) if overlap(one, other)] == []


def test_curves_lie_where_their_numbers_say() -> None:
    tree = ElementTree.fromstring(panel_svg(panels(RECORDS[:1], "loss")[0]))
    points = [tuple(map(float, each.split(","))) for each in tree.find("polyline").attrib["points"].split()]  # type: ignore[union-attr]
    assert len(points) == 200
    (x0, y0), (x1, y1) = points[0], points[-1]
    assert x0 < x1
    assert y0 < y1, "a falling loss falls"


def test_bars_are_as_long_as_their_seconds_and_say_what_they_are() -> None:
    svg = bars_svg(step_bars(RECORDS[:1]))
    boxes = [each.attrib for each in ElementTree.fromstring(svg).findall("rect")][5:]  # those before are the key
    widths = [float(each["width"]) for each in boxes]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.25, 0.05, 0.5, 0.05], rel=0.01)
    assert [each["fill"] for each in boxes] == [
        f"url(#{key})" for key in ("compute", "waiting", "encode", "wire", "decode")
    ]
    assert "computing 20.0 ms" in svg
    assert "on the wire 10.0 ms" in svg


def test_nothing_logged_is_said() -> None:
    svg = panel_svg(panels(RECORDS, "accuracy")[0])
    assert "session.log(accuracy=...)" in svg
    assert "polyline" not in svg


def test_huge_values_of_both_signs_are_drawn() -> None:
    huge = [[step, float(step), 1.7e308 * (-1) ** step] for step in range(1, 201)]
    for panel in panels([record("Dense()") | {"metrics": {"loss": huge}}], "loss"):
        svg = panel_svg(panel)
        assert "nan" not in svg
        assert "inf" not in svg
        assert svg.count("<polyline") == 1
