"""Commands on pages are executed: each printed command succeeds, or support/page_runs.py names why it is not run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.page_runs import NOT_RUN, PAGES, executed, files, of_page, prepare, printed, reason, run_all
from support.paths import ROOT

RUNNABLE = [page for page in PAGES if executed(page)]
TUTORIALS = sorted(set((ROOT / "docs" / "tutorials").glob("*.md")) - {ROOT / "docs" / "tutorials" / "README.md"})


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_succeeds(page: Path, tmp_path: Path) -> None:
    prepare(tmp_path, page.read_text(encoding="utf-8"))
    run_all(executed(page), tmp_path)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_short_and_begins_with_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert "```" in "\n".join(text.splitlines()[:12])
    assert executed(page)


def test_each_reason_is_used() -> None:
    commands = [command for page in PAGES for command in of_page(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, each) for each in commands)] == []
    assert len(commands) > 200


def test_tests_that_reasons_name_exist() -> None:
    named = [path for why in NOT_RUN.values() for path in re.findall(r"tests/[\w/]+\.py", why)]
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert len(named) >= 5


def test_commands_of_a_page_are_found_once_each_and_in_order() -> None:
    page = (
        "    gossamer run train.py  # here\n\n`gossamer explain x.py`, `gossamer explain`\n\n"
        "    gossamer run train.py\n    pip install .\n"
    )
    assert printed(page) == ["gossamer run train.py", "pip install .", "gossamer explain x.py"]
    assert [reason(each) is None for each in printed(page)] == [True, False, True]


def test_a_failing_command_fails_its_page(tmp_path: Path) -> None:
    page = "```python\n# fail.py\nraise SystemExit(3)\n```\n\n    python fail.py\n"
    assert list(files(page)) == [("fail.py", "# fail.py\nraise SystemExit(3)\n")]
    prepare(tmp_path, page)
    with pytest.raises(AssertionError, match="exit code 3"):
        run_all(printed(page), tmp_path)
