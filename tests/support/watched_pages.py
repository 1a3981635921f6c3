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
    """The fixtures `tab`, one of a new browser for a module, and `page`, the tab as a new one would be.

    A new tab starts a process, which compiles the page's scripts again. Each test has a server at another port, so it
    finds nothing in the storage of its origin.
    """

    @pytest.fixture(scope="module")
    def tab() -> Iterator[Any]:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as driver:
            opened = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            found = opened.new_page()
            found.complaints = []
            found.on("pageerror", lambda error: found.complaints.append(str(error)))
            found.on("console", lambda said: found.complaints.append(said.text) if said.type == "error" else None)
            found.on("dialog", lambda dialog: found.complaints.append(dialog.message))
            found.on("request", lambda asked: None if _is_local(asked.url) else found.complaints.append(asked.url))
            yield found
            opened.close()

    @pytest.fixture
    def page(tab: Any) -> Iterator[Any]:
        """Has no error, opens no dialog and asks no other server; `complaints` holds those."""
        tab.set_viewport_size({"width": 1280, "height": 800})
        tab.complaints.clear()
        yield tab
        tab.unroute_all()
        tab.emulate_media(color_scheme="light")
        tab.goto("about:blank")

    return tab, page


def _is_local(url: str) -> bool:
    return "127.0.0.1" in url or url == "about:blank"


def walk(page: Any) -> None:
    """Open every tab by its key. Raises AssertionError where one is wider than the window."""
    for number, tab in enumerate(TABS, start=1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f"#content[data-shown={tab}]")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{tab} scrolls sideways"
