"""The listener of docs/how-to/exporters.md receives the events that the page names, until it unsubscribes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.exporting import step
from support.paths import ROOT

from gossamer import events
from gossamer.events import Noticed

PAGE = (ROOT / "docs" / "how-to" / "exporters.md").read_text(encoding="utf-8")


def test_the_page_s_listener_hears_steps_and_notices(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "subscribe" in block)
    variables: dict[str, Any] = {}
    exec(code, variables)
    try:
        events.emit(replace(step(7), seconds=1.5))
        events.emit(replace(step(8), seconds=0.5))  # none of those that the page tells of
        events.emit(Noticed(message="a disk is full"))
    finally:
        variables["end"]()
    events.emit(replace(step(9), seconds=1.5))  # it has heard enough
    assert capsys.readouterr().out.splitlines() == ["step 7 took 1.5 s", "a disk is full"]
