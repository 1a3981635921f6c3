"""The page of a live run in a real browser: metrics and lines that come while it is open."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_store import SyntheticRun, extend
from support.watched_pages import CHROMIUM, in_browser
from support.watched_runs import KINDS, made

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.telemetry.collector import set_aside
from gossamer.observe.watch.server import PageServer

pytest.importorskip("playwright.sync_api")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
tab, page = in_browser()
LIVE = KINDS["live"]


def print_lines(folder: Path, numbers: Iterable[int]) -> None:
    with closing(open_store(folder / "run.sqlite")) as db, db:
        line = {"at": LIVE.at(80), "rank": 0, "attempt": 0, "stream": "stdout", "level": "info"}
        insert(db, "log", [{**line, "text": f"line {number:05}."} for number in numbers])


def shown_lines(page: Any) -> list[str]:
    texts: list[str] = page.locator(".log .line p").all_text_contents()
    return [text for text in texts if text.startswith("line ")]


def expected_lines(first: int, last: int) -> list[str]:
    return [f"line {number:05}." for number in range(first, last)]


def test_a_metric_that_is_logged_later_gets_a_card(tmp_path: Path, page: Any) -> None:
    with PageServer([made(tmp_path, LIVE)]).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("[data-metric=loss] canvas")
        with closing(open_store(tmp_path / "run.sqlite")) as db, db:
            insert(db, "metric", [{"name": "accuracy", "step": 80, "at": LIVE.at(80), "rank": 0, "value": 0.5}])
        page.wait_for_selector("[data-metric=accuracy] canvas")
        assert page.complaints == []


def test_the_next_run_with_the_same_logs_replaces_the_one_before(tmp_path: Path, page: Any) -> None:
    run = made(tmp_path, KINDS["finished"])
    with PageServer([run]).in_thread() as link:
        page.goto(f"{link}#log")
        page.wait_for_function("() => document.title.startsWith('100 ')")
        page.wait_for_selector("text=step 100 done")
        set_aside(tmp_path / "run.sqlite")
        made(tmp_path, SyntheticRun(ranks=2, steps=7, fails=None, ended=False, began=LIVE.began + 1000))
        page.wait_for_function("() => document.title.startsWith('7 ')")
        page.wait_for_selector("text=2 workers start")
        assert page.locator("text=step 100 done").count() == 0
        assert all("503" in each for each in page.complaints)  # of a request while there was no store


def test_all_lines_of_a_burst_are_shown_without_further_news(tmp_path: Path, page: Any) -> None:
    with PageServer([made(tmp_path, LIVE)]).in_thread() as link:
        page.goto(f"{link}#log")
        page.wait_for_selector(".log .line")
        print_lines(tmp_path, range(1000))
        page.wait_for_selector("text=line 00999.")
        assert shown_lines(page) == expected_lines(0, 1000)
        assert page.complaints == []


def test_earlier_lines_continue_above_those_that_the_page_no_longer_has(tmp_path: Path, page: Any) -> None:
    run = made(tmp_path, LIVE)
    print_lines(tmp_path, range(300))
    with PageServer([run]).in_thread() as link:
        page.goto(f"{link}#log")
        page.wait_for_selector("text=line 00299.")
        print_lines(tmp_path, range(300, 3200))
        page.wait_for_selector("text=line 03199.")
        assert shown_lines(page) == expected_lines(200, 3200)
        page.click("text=Earlier lines")
        page.wait_for_selector("text=line 00199.")
        assert shown_lines(page)[:300] == [*expected_lines(0, 300)]
        assert page.complaints == []


def test_an_answer_for_an_earlier_filter_is_not_shown(tmp_path: Path, page: Any) -> None:
    held: list[Any] = []
    run = made(tmp_path, LIVE)
    with PageServer([run]).in_thread() as link:
        page.goto(f"{link}#log")
        page.wait_for_selector(".log .line")
        page.route("**/log?*after=*", lambda route: route.continue_() if held else held.append(route))
        with page.expect_request(lambda asked: "after=" in asked.url):
            print_lines(tmp_path, [1])
        page.fill(".card input[type=search]", "step 80")
        page.wait_for_selector(".log[data-asked='step 80']")
        with page.expect_response(lambda answer: "after=" in answer.url):
            held[0].continue_()
        with closing(open_store(tmp_path / "run.sqlite")) as db:
            extend(db, LIVE, 81, 81)
        page.wait_for_function("() => document.title.startsWith('81 ')")
        assert shown_lines(page) == []
        assert page.complaints == []
