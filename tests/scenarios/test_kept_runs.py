"""Stored runs are trained again: the draw, the comparison bit for bit, rows of pages, and the line that a page gets."""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks import kept
from benchmarks.markdown_tables import named_rows
from benchmarks.provenance import source_commit
from docs.site.measured_at import commits

LOSS = 1.5831246376037598
PAGE = """# Losses

Written from commit `0123456789` by `python benchmarks/x.py`.

| recipe | held-out loss | seeds |
|---|---:|---:|
| `Dense()` | 1.874 ± 0.008 | 3 |
| ... without feedback | 1.900 ± 0.008 | 3 |
| `Int8()` | 1.875 ± 0.007 | |
"""


def run(kind: str = "LocalSGD", seconds: float = 1.0, loss: float | None = LOSS, seed: int = 0) -> dict[str, Any]:
    return {"kind": kind, "seed": seed, "seconds": seconds, "held_out": loss, "curve": [[8, 2e4, 1.7], [16, 4e4, loss]]}


def drawn(runs: list[dict[str, Any]], count: int, seed: int = 0) -> list[dict[str, Any]]:
    return kept.drawn(runs, count, lambda run: run["kind"], lambda run: run["seconds"], seed)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "source_commit", lambda: "fedcba9876")


def verify(page: Path, runs: list[dict[str, Any]], train: Callable[[Any], Mapping[str, Any]], count: int = 2) -> None:
    kept.verify_runs(
        page, "", runs, count, train, lambda run: run["kind"], lambda run: run["kind"], lambda run: run["seconds"]
    )


# -- the draw ----------------------------------------------------------------------------------------------------------


def test_each_kind_of_recipe_is_drawn_before_any_is_drawn_twice() -> None:
    runs = [run("EveryStep", 0.001, seed=seed) for seed in range(50)] + [run("LocalSGD", 100), run("DiLoCo", 1000)]
    for seed in range(20):
        assert Counter(each["kind"] for each in drawn(runs, 4, seed)) == {"EveryStep": 2, "LocalSGD": 1, "DiLoCo": 1}


def test_short_runs_are_drawn_more_often() -> None:
    runs = [run(seconds=1.0), run(seconds=9.0)]
    firsts = Counter(drawn(runs, 1, seed)[0]["seconds"] for seed in range(2000))
    assert firsts[1.0] / 2000 == pytest.approx(0.9, abs=0.04)


def test_draw_is_repeated_with_the_same_seed_and_differs_with_another() -> None:
    runs = [run(seed=seed) for seed in range(40)]
    assert drawn(runs, 3, 1) == drawn(runs, 3, 1)
    assert len({str(drawn(runs, 3, seed)) for seed in range(10)}) > 5
    assert len(drawn(runs, 99)) == 40


# -- stored runs -------------------------------------------------------------------------------------------------------


def test_equal_runs_give_the_page_a_line_and_its_age(page: Path) -> None:
    verify(page, [run(), run("DiLoCo"), run(seed=1)], lambda run: {**run, "seconds": 9.0, "curve": map_to_tuples(run)})
    line = "Trained again at commit `fedcba9876`: 2 of 3 runs, equal losses."
    assert f"x.py`.\n\n{line}\n\n| recipe" in page.read_text()
    assert commits(page.read_text()) == ["fedcba9876"]


def map_to_tuples(run: dict[str, Any]) -> list[tuple[float, ...]]:
    """A curve before it is stored as JSON."""
    return [tuple(point) for point in run["curve"]]


@pytest.mark.parametrize("changed", [{"held_out": math.nextafter(LOSS, 2)}, {"curve": []}, {"held_out": None}])
def test_one_bit_of_difference_is_written_and_leaves_the_age_of_the_page(page: Path, changed: dict[str, Any]) -> None:
    verify(page, [run(), run("DiLoCo")], lambda run: {**run, **(changed if run["kind"] == "DiLoCo" else {})})
    assert "2 of 2 runs, 1 of them with other losses. DiLoCo: " in page.read_text()
    assert commits(page.read_text()) == ["0123456789", "fedcba9876"]


def test_size_of_a_difference_is_written() -> None:
    assert kept.differences(run(loss=2.0), run(loss=2.02)) == [
        "held_out 2, now 2.02 (relative difference 1.0e-02)",
        "curve changed",
    ]


def test_a_second_check_replaces_the_line_of_the_first(page: Path) -> None:
    for train in (lambda run: {**run, "held_out": 1.0}, lambda run: run):
        verify(page, [run()], train)
    assert page.read_text().count("Trained again") == 1
    assert kept.lines_again(page) == ["Trained again at commit `fedcba9876`: 1 of 1 runs, equal losses."]


def test_line_is_put_into_its_part_of_a_page(page: Path) -> None:
    part = "<!-- written by a program: {0} -->\n\nWritten from commit `{1}`.\n\nText.\n\n<!-- end: {0} -->\n"
    page.write_text(f"# Page\n\n{part.format('loss', '0000000001')}\n{part.format('speed', '0000000002')}")
    kept.put_line(page, kept.result("1 of 9 rows", "figures", {}), "speed")
    assert kept.lines_again(page, "loss") == []
    assert kept.lines_again(page, "speed") == ["Trained again at commit `fedcba9876`: 1 of 9 rows, equal figures."]
    assert commits(page.read_text()) == ["0000000001", "fedcba9876"]


# -- rows of pages -----------------------------------------------------------------------------------------------------


def test_rows_have_the_heading_and_their_names() -> None:
    found = named_rows(PAGE + "\n## Two\n\n| a | b | c |\n| --- | --- | ---: |\n| x | y | 1 |\n")
    assert [*found] == [
        "Losses | `Dense()`",
        "Losses | `Dense()` ... without feedback",
        "Losses | `Int8()`",
        "Two | x | y",
    ]
    assert found["Two | x | y"] == {"a": "x", "b": "y", "c": "1"}
    assert next(iter(named_rows(PAGE, names=2))) == "Losses | `Dense()` | 1.874 ± 0.008"


def test_equal_rows_give_the_page_a_line(page: Path) -> None:
    made = {"Losses | `Int8()`": {"held-out loss": "1.875 ± 0.007", "seconds": "9"}}
    kept.verify_rows(page, "", made)
    assert kept.lines_again(page) == ["Trained again at commit `fedcba9876`: 1 of 3 rows, equal figures."]


@pytest.mark.parametrize("cells", [{"held-out loss": "1.875 ± 0.008"}, {"seconds": "9"}])
def test_another_digit_or_no_column_in_common_is_no_equal_row(page: Path, cells: dict[str, str]) -> None:
    kept.verify_rows(page, "", {"Losses | `Int8()`": cells})
    assert "1 of 3 rows, 1 of them with other figures. Losses | `Int8()`: " in kept.lines_again(page)[0]
    assert commits(page.read_text())[0] == "0123456789"


def test_ignored_columns_are_not_compared(page: Path) -> None:
    made = {"Losses | `Dense()`": {"held-out loss": "1.874 ± 0.008", "seeds": "4"}}
    kept.verify_rows(page, "", made, ignored=["seeds"])
    assert ", equal figures." in kept.lines_again(page)[0]


def test_row_that_the_page_does_not_have_is_refused(page: Path) -> None:
    with pytest.raises(SystemExit, match=r"no row 'Losses \| `TopK"):
        kept.verify_rows(page, "", {"Losses | `TopK(0.1)`": {"held-out loss": "1.0"}})
    assert kept.lines_again(page) == []


# -- the commit --------------------------------------------------------------------------------------------------------


def test_commit_of_a_check_is_the_last_one_that_changed_the_package(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def change(name: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name + git("rev-parse", "HEAD") if (tmp_path / ".git" / "index").exists() else "")
        git("add", name)
        git("commit", "--quiet", "--message", name)
        return git("rev-parse", "--short=10", "HEAD")

    git("init", "--quiet")
    package = change("src/gossamer/a.py")
    change("benchmarks/x.py")
    change("docs/page.md")
    assert source_commit(tmp_path) == package
    (tmp_path / "docs" / "page.md").write_text("changed")
    assert source_commit(tmp_path) == package
    (tmp_path / "benchmarks" / "x.py").write_text("changed")
    assert source_commit(tmp_path) == f"{package}-dirty"
