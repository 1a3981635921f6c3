"""Pages of `gossamer watch` in headless chromium, driven by playwright: fixtures, and a walk through every tab."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TABS = ("overview", "workers", "network", "compression", "log")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def in_browser() -> tuple[Any, Any]:
    """The fixtures `browser`, one for a module, and `page`, of which every test has a new one."""

    @pytest.fixture(scope="module")
    def browser() -> Iterator[Any]:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as driver:
            opened = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            yield opened
            opened.close()

    @pytest.fixture
    def page(browser: Any) -> Iterator[Any]:
        """Has no error, opens no dialog and asks no other server; `complaints` holds those."""
        opened = browser.new_page(viewport={"width": 1280, "height": 800})
        opened.complaints = []
        opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.on("console", lambda said: opened.complaints.append(said.text) if said.type == "error" else None)
        opened.on("dialog", lambda dialog: opened.complaints.append(dialog.message))
        opened.on("request", lambda asked: None if "127.0.0.1" in asked.url else opened.complaints.append(asked.url))
        yield opened
        opened.close()

    return browser, page


def walk(page: Any) -> None:
    """Open every tab by its key. Raises AssertionError where one is wider than the window."""
    for number, tab in enumerate(TABS, start=1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f"#content[data-shown={tab}]")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{tab} scrolls sideways"
