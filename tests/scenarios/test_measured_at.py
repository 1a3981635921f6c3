"""Benchmark pages of the site show how many commits changed the code since their figures were measured."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from docs.site.measured_at import MEASURES, PAGES, SOURCE, commits, with_age
from support.paths import ROOT

PAGE = "# Pace\n\nHow fast?\n\nWritten from commit `{}` by `python benchmarks/pace.py`.\n"
MEASURED, OTHER = f"{SOURCE}/train/step.py", f"{SOURCE}/federated/round.py"


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[str], str]:
    """Commit a change of a file in a new repository at tmp_path; returns the commit."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def change(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        git("add", name)
        git("commit", "--quiet", "--message", f"change {name}")
        return git("rev-parse", "--short=10", "HEAD")

    git("init", "--quiet")
    return change


def test_page_older_than_the_code_has_a_note(tmp_path: Path, commit: Callable[[str], str]) -> None:
    page = PAGE.format(measured := commit(MEASURED))
    commit(MEASURED)
    commit(OTHER)
    commit(MEASURED)
    shown = with_age("benchmarks/pace.md", page, tmp_path)
    assert f"Since commit `{measured}`, 2 commits have changed code that this page measures" in shown
    assert shown.index("# Pace") < shown.index("!!! note") < shown.index("How fast?")


def test_page_as_old_as_the_code_it_measures_has_no_note(tmp_path: Path, commit: Callable[[str], str]) -> None:
    page = PAGE.format(commit(MEASURED))
    commit(OTHER)
    assert with_age("benchmarks/pace.md", page, tmp_path) == page


def test_oldest_of_several_parts_is_named(tmp_path: Path, commit: Callable[[str], str]) -> None:
    oldest, newest = commit(MEASURED), commit(MEASURED)
    page = PAGE.format(newest) + f"Losses from commit `{oldest}`.\n"
    assert f"Since commit `{oldest}`, 1 commits" in with_age("benchmarks/pace.md", page, tmp_path)


AGAIN = "Trained again at commit `{}`: 3 of 40 runs, {}.\n\n"


def test_equal_losses_of_a_second_training_make_a_page_younger(tmp_path: Path, commit: Callable[[str], str]) -> None:
    page, again = PAGE.format(commit(MEASURED)), commit(MEASURED)
    assert with_age("benchmarks/pace.md", page + AGAIN.format(again, "equal losses"), tmp_path).count("!!! note") == 0
    commit(MEASURED)
    shown = with_age("benchmarks/pace.md", page + AGAIN.format(again, "equal losses"), tmp_path)
    assert f"Since commit `{again}`, 1 commits" in shown
    begun = page + AGAIN.format(again, "equal losses").replace("3 of 40", "10 % of the steps of 3 of 40")
    assert f"Since commit `{again}`, 1 commits" in with_age("benchmarks/pace.md", begun, tmp_path)


def test_other_losses_of_a_second_training_do_not(tmp_path: Path, commit: Callable[[str], str]) -> None:
    page, again = PAGE.format(first := commit(MEASURED)), commit(MEASURED)
    shown = with_age("benchmarks/pace.md", page + AGAIN.format(again, "1 of them with other losses"), tmp_path)
    assert f"Since commit `{first}`, 1 commits" in shown
    dirty = with_age("benchmarks/pace.md", page + AGAIN.format(f"{again}-dirty", "equal losses"), tmp_path)
    assert f"Since commit `{first}`, 1 commits" in dirty


def test_a_second_training_counts_for_its_part_of_a_page_alone() -> None:
    part = "<!-- written by a program: {0} -->\nWritten from commit `{1}`.\n\n{2}<!-- end: {0} -->\n"
    line = AGAIN.format("ccccccc", "equal losses")
    page = (
        f"# Page\n{part.format('loss', 'aaaaaaa', line)}{part.format('speed', 'bbbbbbb', '')}From commit `ddddddd`.\n"
    )
    assert commits(page) == ["ccccccc", "bbbbbbb", "ddddddd"]


def test_page_of_a_commit_outside_the_history_has_a_note(tmp_path: Path, commit: Callable[[str], str]) -> None:
    commit(MEASURED)
    assert "older than the history" in with_age("benchmarks/pace.md", PAGE.format("0123456789"), tmp_path)


def test_page_without_a_commit_has_a_note(tmp_path: Path, commit: Callable[[str], str]) -> None:
    commit(MEASURED)
    assert "names no commit" in with_age("benchmarks/pace.md", "# Pace\n\nHow fast?\n", tmp_path)


def test_without_the_history_and_on_other_pages_there_is_no_note(tmp_path: Path) -> None:
    page = PAGE.format("0123456789")
    assert with_age("benchmarks/pace.md", page, tmp_path) == page
    assert with_age("guides/pace.md", page, ROOT) == page


def test_every_benchmark_page_has_the_packages_that_it_measures() -> None:
    assert {*MEASURES} == {page.stem for page in PAGES.glob("*.md")} - {"README", "gpu"}
    assert [name for names in MEASURES.values() for name in names if not (ROOT / SOURCE / name).exists()] == []


def test_commits_of_a_page_are_found() -> None:
    assert commits("from commit `a1b2c3d`, bytes from `1234567-dirty`; commit `a1b2c3d`") == ["a1b2c3d", "1234567"]
