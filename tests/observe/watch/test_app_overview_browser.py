"""Overview in a real browser: charts fit their cards, all metrics can be shown, and an error does not end updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.synthetic_store import extend
from support.watched_pages import CHROMIUM, in_browser
from support.watched_runs import KINDS, made

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.server import PageServer

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
browser, page = in_browser()
MISFITS = """() => [...document.querySelectorAll('.chart:has(.uplot)')].filter((chart) =>
    Math.abs(chart.querySelector('.u-wrap').offsetWidth - chart.clientWidth) > 1).length"""
DRAWN = """() => [...document.querySelectorAll('[data-metric]:has(canvas) .note')].filter((words) =>
    /ranks?$|finite$/.test(words.textContent)).length"""


def logging(folder: Path, metrics: int) -> WatchedRun:
    """A run that logs so many metrics besides two losses."""
    run = made(folder, KINDS["live"])
    db = open_store(folder / "run.sqlite")
    rows = [
        {"name": f"m{number:02}", "step": step, "at": KINDS["live"].at(step), "rank": 0, "value": float(step)}
        for number in range(metrics)
        for step in range(1, 6)
    ]
    with db:
        insert(db, "metric", rows)
    db.close()
    return run


@pytest.mark.parametrize("width", [1280, 375])
def test_charts_fit_their_cards_at_once_and_after_each_change_of_the_grid(
    tmp_path: Path, page: Any, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    with PageServer([logging(tmp_path, 1)]).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("#content[data-shown=overview]")
        page.wait_for_function(f"() => ({DRAWN})() === 3 && ({MISFITS})() === 0")
        page.fill("input[type=search]", "m00")  # one card, as wide as the page
        page.wait_for_function(f"() => ({DRAWN})() === 1 && ({MISFITS})() === 0")
        page.fill("input[type=search]", "")
        page.wait_for_function(f"() => ({DRAWN})() === 3 && ({MISFITS})() === 0")
        assert page.complaints == []


def test_show_more_shows_all_of_many_metrics(tmp_path: Path, page: Any) -> None:
    with PageServer([logging(tmp_path, 28)]).in_thread() as link:
        page.goto(link)
        for shown in (6, 18, 30):
            page.wait_for_function(f"() => ({DRAWN})() === {shown}")
            if shown < 30:
                page.click("text=Show more")
        assert page.complaints == []


def test_the_page_says_why_it_is_not_up_to_date_and_recovers(tmp_path: Path, page: Any) -> None:
    with PageServer([logging(tmp_path, 1)]).in_thread() as link:
        page.route("**/curves?*", lambda route: route.fulfill(status=503, body='{"problem": "The store is busy."}'))
        page.goto(link)
        playwright.expect(page.locator("#problem")).to_contain_text("not up to date: The store is busy. It tries")
        page.unroute("**/curves?*")
        page.wait_for_function(f"() => ({DRAWN})() === 3")
        playwright.expect(page.locator("#problem")).to_be_hidden()


def test_a_page_whose_first_answer_is_an_error_recovers(tmp_path: Path, page: Any) -> None:
    with PageServer([logging(tmp_path, 1)]).in_thread() as link:
        page.route("**/api/runs?*", lambda route: route.fulfill(status=500, body="Internal Server Error"))
        page.goto(link)
        playwright.expect(page.locator("#problem")).to_contain_text("Internal Server Error")
        page.unroute("**/api/runs?*")
        page.wait_for_selector("#content[data-shown=overview]")
        db = open_store(tmp_path / "run.sqlite")
        extend(db, KINDS["live"], 81, 95)
        db.close()
        page.wait_for_function("() => document.title.startsWith('95 ')")
