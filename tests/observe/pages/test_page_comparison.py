"""The page of a comparison: curves and bars of every record, without a library, and nothing that is fetched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.run_records import record
from support.watched_pages import CHROMIUM, in_browser

from gossamer.base import figures
from gossamer.observe.pages.page import write_page

tab, opened = in_browser()
NAMES = ["Dense()", "TopK(density=0.01)", "Int8()", "home", "a < b & c"]
RECORDS: list[dict[str, Any]] = [record(name) for name in NAMES]


def page(folder: Path, records: list[dict[str, Any]]) -> str:
    path = folder / "page.html"
    write_page(
        path,
        title=f"{len(records)} recipes",
        about="about <this>",
        header=["recipe", "step"],
        rows=[[each["recipe"], "1 s"] for each in records],
        records=records,
        command="gossamer compare <x>",
    )
    return path.read_text(encoding="utf-8")


def test_a_page_needs_no_library_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    text = page(tmp_path, RECORDS)
    assert text.count("<svg ") == text.count("</svg>")
    assert len(re.findall('class="(?:broad|narrow)"', text)) == 2 * 3
    assert "about &lt;this&gt;" in text
    assert "gossamer compare &lt;x&gt;" in text
    assert re.findall(r"""(?:src|href)\s*=|@import|https?://""", text) == []
    assert re.findall(r"url\((?!#)", text) == []
    assert text.index("loss over time") < text.index("loss over bytes") < text.index("time of a step")


def test_every_recipe_has_a_row_a_key_for_its_curves_and_bars(tmp_path: Path) -> None:
    text = page(tmp_path, RECORDS)
    for number, name in enumerate(["Dense()", "TopK(density=0.01)", "Int8()", "home", "a &lt; b &amp; c"], start=1):
        assert text.count(f'<td class="name">{name}</td>') == 1
        assert text.count(f'<li class="s{number - 1}"><i></i>{number} {name}</li>') == 2
        assert text.count(f">{name}</text>") == 2


def test_parts_of_a_step_are_named_with_their_milliseconds(tmp_path: Path) -> None:
    text = page(tmp_path, RECORDS[:1])
    assert "computing 20 ms<" in text
    assert "on the wire 10 ms<" in text
    for name in ("computing", "waiting", "compressing", "on the wire", "decompressing"):
        assert f"</svg>{name}</li>" in text


def test_a_falling_loss_falls(tmp_path: Path) -> None:
    (points, *_) = re.findall('<polyline class="line s0" points="([^"]*)"', page(tmp_path, RECORDS[:1]))
    places = [tuple(map(float, each.split(","))) for each in points.split()]
    assert len(places) == 200
    (x0, y0), (x1, y1) = places[0], places[-1]
    assert x0 < x1
    assert y0 < y1


def test_nothing_logged_is_reported(tmp_path: Path) -> None:
    text = page(tmp_path, [record("Dense()") | {"metrics": {}}])
    assert "session.log(loss=...)" in text
    assert "polyline" not in text


def test_huge_values_of_both_signs_are_drawn(tmp_path: Path) -> None:
    huge = [[step, float(step), 1.7e308 * (-1) ** step] for step in range(1, 201)]
    text = page(tmp_path, [record("Dense()") | {"metrics": {"loss": huge}}])
    assert text.count("<polyline") == 2 * 2
    for points in re.findall('<polyline[^>]*points="([^"]*)"', text):
        assert "nan" not in points
        assert "inf" not in points


@pytest.mark.browser
@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_it_at_every_width_and_in_both_modes(tmp_path: Path, opened: Any) -> None:
    pytest.importorskip("playwright.sync_api")
    page(tmp_path, RECORDS)
    for width in (1280, 400):
        opened.set_viewport_size({"width": width, "height": 800})
        opened.goto(f"file://{tmp_path}/page.html")
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert opened.locator("svg.broad >> visible=true").count() == (3 if width == 1280 else 0)
        before = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        opened.click("#theme")
        assert opened.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert [each for each in opened.complaints if not each.startswith("file://")] == []
