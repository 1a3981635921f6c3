"""The page in a real browser. Needs chromium, and the packages playwright, starlette and uvicorn."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_store import SyntheticRun, extend
from support.watched_pages import CHROMIUM, TABS, in_browser, walk
from support.watched_runs import KINDS, by_speed, hostile, made

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
tab, page = in_browser()


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


def test_workers_show_their_part_of_the_work_by_speed(tmp_path: Path, page: Any) -> None:
    with PageServer([by_speed(tmp_path)]).in_thread() as link:
        page.goto(f"{link}#workers")
        page.wait_for_selector(".cells .cell")
        cells = page.locator(".cells .cell").all_inner_texts()
        assert ["75 % of a step" in cells[0], "25 % of a step" in cells[1]] == [True, True]
        assert ["20 local steps per period" in cells[2], "4 local steps per period" in cells[3]] == [True, True]
        assert page.complaints == []


def test_relayed_pairs_have_a_dot_and_the_name_of_their_relay(tmp_path: Path, page: Any) -> None:
    run = made(tmp_path, KINDS["finished"])
    for relay in (None, "rank 0"):
        with closing(open_store(tmp_path / "run.sqlite")) as db, db:
            db.execute("UPDATE link SET through = ? WHERE source + target = 3", (relay,))  # 1 and 2; 0 and 3
        with PageServer([run]).in_thread() as link:
            page.goto(f"{link}#network")
            page.wait_for_selector("#content[data-shown=network] .heat canvas")
            page.wait_for_selector("td.left")
            dots = page.locator(".heat .dots i")
            assert dots.count() == (4 if relay else 0)
            assert page.get_by_text("A dot marks").is_visible() == bool(relay)
            assert page.locator("td.left small").all_inner_texts() == ([" through rank 0"] * 4 if relay else [])
            assert page.complaints == []
            if relay is None:
                page.goto("about:blank")  # or it would ask the closed server once more, and complain
                continue
            canvas, dot = page.locator(".heat .plane canvas").bounding_box(), dots.first.bounding_box()
            middle = dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2
            place = (middle[0] - canvas["x"]) / canvas["width"] * 4, (middle[1] - canvas["y"]) / canvas["height"] * 4
            assert place == pytest.approx((3.5, 0.5), abs=0.1)  # the column of rank 3, the row of rank 0
            page.mouse.move(*middle)
            page.locator(".heat .told", has_text=", through rank 0").wait_for()


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


# -- The page's frame in a real browser: it fits every width, does not jump, obeys the keys, and goes on after a cut
PHONE = {"width": 375, "height": 740}
FRAME = """['header', '#head', 'nav', 'main'].map((each) => {
    const box = document.querySelector(each).getBoundingClientRect();
    return [each, box.x, box.y, box.width];
})"""


def test_64_ranks_fit_without_scrolling_sideways(tmp_path: Path, page: Any) -> None:
    run = SyntheticRun(ranks=64, steps=20, per_machine=8, fails=None, vital_every=20)
    with PageServer([made(tmp_path, run)]).in_thread() as link:
        for width in (375, 1280):
            page.set_viewport_size({"width": width, "height": 740})
            page.goto(link)
            page.wait_for_selector("#content[data-shown=overview]")
            walk(page)
            page.keyboard.press("2")
            page.wait_for_selector("#content[data-shown=workers]")
            assert page.evaluate("document.querySelector('.heat canvas').height") == 64
            assert page.locator(".cells .cell").count() == 64
        assert page.complaints == []


def test_what_is_too_wide_is_seen(tmp_path: Path, page: Any) -> None:
    """The broken twin of the walk: an element wider than the window."""
    page.set_viewport_size(PHONE)
    with PageServer([made(tmp_path, KINDS["live"])]).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("#content[data-shown=overview]")
        page.evaluate("document.querySelector('#head').style.width = '900px'")
        with pytest.raises(AssertionError, match="scrolls sideways"):
            walk(page)


def test_the_frame_does_not_jump_as_steps_come(tmp_path: Path, page: Any) -> None:
    """Nor do the charts: every card stays where it was. Where one moved, that is seen."""
    run, cards = KINDS["live"], "[...document.querySelectorAll('.card')].map((each) => each.offsetTop)"
    with PageServer([made(tmp_path, run)]).in_thread() as link:
        for size, first, last in ((PHONE, 81, 90), ({"width": 1280, "height": 800}, 91, 99)):
            page.set_viewport_size(size)
            page.goto(link)
            page.wait_for_selector("#content[data-shown=overview]")
            playwright.expect(page).to_have_title(re.compile(f"^{first - 1} "))
            before = page.evaluate(FRAME), page.evaluate(cards)
            with closing(open_store(tmp_path / "run.sqlite")) as db:
                extend(db, run, first, last)
            playwright.expect(page).to_have_title(re.compile(f"^{last} "))
            assert (page.evaluate(FRAME), page.evaluate(cards)) == before
        page.evaluate("document.querySelector('#head').style.marginBottom = '9px'")
        assert page.evaluate(FRAME) != before[0]


def test_light_and_dark_are_as_the_system_says_until_a_key_turns_them(tmp_path: Path, page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with PageServer([made(tmp_path, KINDS["crashed"])]).in_thread() as link:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.goto(link)
            page.wait_for_selector("#content[data-shown=overview]")
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            first = page.evaluate(ground)
            page.keyboard.press("t")
            assert page.evaluate(ground) != first
            walk(page)
            page.evaluate("localStorage.clear()")  # where the key's theme is kept
        assert page.complaints == []


def test_a_thousand_metrics_are_searched_and_not_all_drawn(tmp_path: Path, page: Any) -> None:
    with PageServer([hostile(tmp_path)]).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("#content[data-shown=overview]")
        assert 1 <= page.locator("[data-metric]").count() <= 6
        page.keyboard.press("/")
        page.keyboard.type("metric-0777")
        playwright.expect(page.locator("[data-metric='metric-0777']")).to_be_visible()
        playwright.expect(page.locator("[data-metric]")).to_have_count(1)
        assert page.complaints == []


def test_what_was_never_finite_is_reported(tmp_path: Path, page: Any) -> None:
    with PageServer([hostile(tmp_path, metrics=3)]).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("#content[data-shown=overview]")
        page.keyboard.press("/")
        page.keyboard.type("never")
        playwright.expect(page.locator("[data-metric=never]")).to_contain_text("1 values were not finite")
        assert page.complaints == []


def test_a_wrong_token_shows_no_run_and_the_right_one_does(tmp_path: Path, page: Any) -> None:
    with PageServer([made(tmp_path, KINDS["live"])]).in_thread() as link:
        for address, status in ((link.replace("token=", "token=x"), 403), (link, 200)):
            assert page.goto(address).status == status
            assert page.locator("#head").count() == (status == 200)


@pytest.mark.parametrize("seen_before", [True, False])
def test_what_failed_while_the_connection_was_cut_is_reported_once_it_is_back(
    tmp_path: Path, page: Any, monkeypatch: pytest.MonkeyPatch, seen_before: bool
) -> None:
    """A server that comes again under the same link. A page opened only then is told of no old failure as if it were
    news."""
    monkeypatch.setattr("gossamer.observe.watch.server.secrets.token_urlsafe", lambda count: "the-token")
    run, connection = made(tmp_path, KINDS["live"]), page.locator("#connection")
    first = PageServer([run])
    with first.in_thread() as link:
        if seen_before:
            page.goto(link)
            playwright.expect(page).to_have_title(re.compile("^80 "))
            playwright.expect(connection).to_have_text("connected")
    if seen_before:
        playwright.expect(connection).to_have_attribute("data-state", "lost")
    db = open_store(tmp_path / "run.sqlite")
    extend(db, KINDS["live"], 81, 90)
    with db:
        told = {"attempt": 0, "kind": "raised", "traceback": "", "caused_by": None}
        insert(db, "failure", [{**told, "at": KINDS["live"].at(90), "rank": 3, "message": "OSError: while away"}])
    db.close()
    with PageServer([run], port=first.port).in_thread() as link:
        if not seen_before:
            page.goto(link)
        playwright.expect(page).to_have_title(re.compile("^90 "))
        playwright.expect(connection).to_have_text("connected")
        playwright.expect(page.locator("#notes > div")).to_have_count(1 if seen_before else 0)


def test_tabs_are_reached_and_opened_by_keyboard_alone(tmp_path: Path, page: Any) -> None:
    with PageServer([made(tmp_path, KINDS["finished"])]).in_thread() as link:
        page.goto(link)
        page.wait_for_selector("#content[data-shown=overview]")
        for tab in TABS:
            page.focus(f"#tab-{tab}")
            page.keyboard.press("Enter")
            page.wait_for_selector(f"#content[data-shown={tab}]")
            assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        page.keyboard.press("?")
        assert page.evaluate("document.querySelector('dialog').open")
        page.keyboard.press("Escape")
        assert not page.evaluate("document.querySelector('dialog').open")
        assert page.complaints == []


def test_what_was_unfolded_stays_so_as_events_come_and_what_comes_is_folded(tmp_path: Path, page: Any) -> None:
    run = made(tmp_path, KINDS["live"])

    def tell(number: int) -> None:
        db = open_store(tmp_path / "run.sqlite")
        content = json.dumps({"why": f"silence {number}", "ranks": [1], "lines": [f"rank 1: at line {number}"]})
        with db:
            insert(db, "event", [{"at": 1e9 + number, "rank": None, "kind": "stacks", "content": content}])
        db.close()

    tell(0)
    with PageServer([run]).in_thread() as link:
        page.goto(link)
        page.keyboard.press("5")
        page.locator("details summary").click()
        page.wait_for_selector("text=rank 1: at line 0")
        tell(1)
        page.wait_for_selector("text=silence 1")
        assert page.evaluate("[...document.querySelectorAll('details')].map((each) => each.open)") == [False, True]
        assert page.complaints == []


# -- Overview in a real browser: charts fit their cards, all metrics can be shown, and an error does not end updates
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


def test_the_page_gives_the_reason_it_is_not_up_to_date_and_recovers(tmp_path: Path, page: Any) -> None:
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
