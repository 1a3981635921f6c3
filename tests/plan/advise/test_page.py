"""The page of an advice: everything is on it, nothing comes from elsewhere, and markup stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.planted_advice import planted_advice
from support.watched_pages import CHROMIUM, in_browser

from gossamer.plan.advise.advice_file import Advice
from gossamer.plan.advise.page import page, write_advice_page

tab, opened = in_browser()
HOSTILE = "</script><img src=x onerror=alert(1)>"
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def advice() -> Advice:
    return planted_advice(budget=2000.0)


class _Balance(HTMLParser):
    """Finds tags that are closed in another order than they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: object) -> None:
        """Opened and closed at once."""

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_every_tag_is_closed_in_its_order(advice: Advice) -> None:
    balance = _Balance()
    balance.feed(page(advice))
    assert balance.wrong == balance.open == []


def test_everything_is_on_it(advice: Advice) -> None:
    text = page(advice)
    for row in advice.contenders:
        assert row.recipe in text
    for said in (
        "rate above 400",
        "dominated by",
        "sign agreement",
        "a hundredth holds",
        "estimated",
        "measured",
        "failed: loss is nan",
    ):
        assert said in text
    assert text.count("<polyline") >= 2 * len(advice.contenders)


def test_nothing_is_fetched(advice: Advice) -> None:
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", page(advice)) == []


def test_markup_stays_text(advice: Advice) -> None:
    hostile = replace(
        advice,
        use=HOSTILE,
        gain=HOSTILE,
        cost=HOSTILE,
        command=HOSTILE,
        script=HOSTILE,
        network=HOSTILE,
        metric=HOSTILE,
        remarks=(HOSTILE,),
        would_change=(HOSTILE,),
        gradients={HOSTILE: 1.0},
        contenders=tuple(replace(each, recipe=HOSTILE, out=HOSTILE) for each in advice.contenders),
        candidates=tuple(replace(each, recipe=HOSTILE, excluded=HOSTILE) for each in advice.candidates),
        confirmed=tuple(replace(each, recipe=HOSTILE) for each in advice.confirmed),
    )
    assert "<img" not in page(hostile)
    assert page(hostile).count("&lt;img") > 20


def test_where_the_baseline_ran_far_ahead_seconds_are_logarithmic(advice: Advice) -> None:
    first, *others = advice.contenders
    far = replace(first, curve=(*first.curve, (10**6, 100 * advice.race_seconds, 1.0)))

    def width(shown: Advice) -> float:
        """Of the widest curve but the baseline's, in the broad picture of the race."""
        lines = re.findall(r'<polyline class="line s[1-9]" points="([^"]*)"', page(shown))
        return max(float(line.split()[-1].split(",")[0]) - float(line.split(",")[0]) for line in lines)

    ahead = width(replace(advice, contenders=(far, *others)))
    assert ahead > 0.3 * width(advice)  # on a straight axis it would be a hundredth


def test_an_interval_that_nothing_is_known_of_is_not_shown(advice: Advice) -> None:
    first, second, *others = advice.contenders
    unknown = replace(second, loss_at_equal_steps=(0.123456, None, None), speedup=None)
    shown = page(replace(advice, contenders=(first, unknown, *others)))
    assert "+0.123" in shown
    assert "? to ?" not in shown
    heights = re.findall(r'<g class="dot s1">.*?<line x1="[^"]*" y1="([^"]*)" x2="[^"]*" y2="([^"]*)"/>', shown)
    assert heights
    assert all(low == high for low, high in heights)


def test_an_advice_without_a_race_has_a_page(advice: Advice) -> None:
    bare = replace(advice, contenders=(), candidates=(), rungs=(), would_change=(), gradients={}, confirmed=())
    assert "<polyline" not in page(bare)


@pytest.mark.browser
@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_it_at_every_width_and_in_both_modes(tmp_path: Path, advice: Advice, opened: Any) -> None:
    pytest.importorskip("playwright.sync_api")
    write_advice_page(tmp_path / "advice.html", advice)
    for width in (1280, 400):
        opened.set_viewport_size({"width": width, "height": 800})
        opened.goto(f"file://{tmp_path}/advice.html")
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert opened.locator("section.card").count() >= 6
        assert opened.locator("svg.broad >> visible=true").count() == (3 if width == 1280 else 0)
        before = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        opened.click("#theme")
        assert opened.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert [each for each in opened.complaints if not each.startswith("file://")] == []
