"""The page in a real browser. Needs chromium, and the packages playwright, starlette and uvicorn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_store import extend
from support.watched_pages import CHROMIUM, in_browser, walk
from support.watched_runs import KINDS, hostile, made

from gossamer.observe.telemetry import open_store
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_tab_of_every_kind_of_run_at_every_width(tmp_path: Path, page: Any, kind: str) -> None:
    with PageServer([made(tmp_path, KINDS[kind])]).in_thread() as link:
        for width in (1280, 375):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(link)
            page.wait_for_selector("#content[data-shown=overview]")
            walk(page)
        assert page.complaints == []


def test_a_step_of_a_live_run_comes_to_the_page_by_itself(tmp_path: Path, page: Any) -> None:
    with PageServer([made(tmp_path, KINDS["live"])]).in_thread() as link:
        page.goto(link)
        playwright.expect(page).to_have_title(re.compile("^80 "))
        db = open_store(tmp_path / "run.sqlite")
        extend(db, KINDS["live"], 81, 95)
        db.close()
        playwright.expect(page).to_have_title(re.compile("^95 "))
        assert page.complaints == []


def test_markup_stays_text(tmp_path: Path, page: Any) -> None:
    with PageServer([hostile(tmp_path)]).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("#content[data-shown=overview]")
        assert "<script>" in page.inner_text("#head h1")
        walk(page)
        assert "<img src=x" in page.text_content(".log")
        assert "<script>" in page.inner_text(".failure")
        assert page.evaluate("document.querySelectorAll('main script, main img, #head script, #head img').length") == 0
        assert "taken" not in page.title().split(" · ")[0]
        assert page.complaints == []


def test_the_log_is_filtered_where_it_is_kept(tmp_path: Path, page: Any) -> None:
    with PageServer([made(tmp_path, KINDS["crashed"])]).in_thread() as link:
        page.goto(f"{link}#log")
        page.wait_for_selector("#content[data-shown=log]")
        page.keyboard.press("/")
        page.keyboard.type("step 40")
        page.wait_for_selector(".log[data-asked='step 40']")
        assert page.locator(".log .line").count() == KINDS["crashed"].ranks
        assert "Rank 2 raised an error first" in page.inner_text(".failure")
        assert page.complaints == []


def test_runs_lie_side_by_side_and_one_is_chosen(tmp_path: Path, page: Any) -> None:
    both = [made(tmp_path / kind, KINDS[kind], str(place)) for place, kind in enumerate(("finished", "crashed"))]
    with PageServer(both).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("#content[data-shown=overview]")
        assert page.locator("#runs button").all_inner_texts() == ["finished", "crashed"]
        playwright.expect(page).to_have_title(re.compile("finished"))
        page.keyboard.press("]")
        playwright.expect(page).to_have_title(re.compile("crashed"))
        assert page.complaints == []
