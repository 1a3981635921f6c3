from __future__ import annotations

from pathlib import Path

import pytest
from support.run_records import record

from gossamer.observe import plot
from gossamer.observe.page import write_page


def test_a_page_needs_no_library_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    path = tmp_path / "page.html"
    write_page(
        path,
        title="2 recipes",
        about="about <this>",
        header=["recipe", "step"],
        rows=[["Dense()", "1 s"]],
        records=[record("Dense()"), record("Int8()")],
        command="gossamer compare",
    )
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg ") == page.count("</svg>") == 3
    assert "about &lt;this&gt;" in page
    assert "://" not in page
    assert "<img" not in page
    assert page.index("loss over time") < page.index("loss over bytes") < page.index("where a step")
