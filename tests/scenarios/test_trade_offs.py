"""Figures of docs/reference/trade-offs.md equal those of the code and of the pages of measurements; all are present."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from support.paths import ROOT

from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.mesh.collective_selector import REQUESTABLE
from gossamer.events import Attached
from gossamer.plan.profile.user_script import attached_by
from gossamer.train.traffic.traffic import estimate_traffic

SCRIPT, SIZE = ROOT / "examples" / "bytelm.py", "base"


@cache
def model() -> Attached:
    """The byte model of 3.3 million parameters, as `gossamer explain` learns of it."""
    return attached_by(SCRIPT, ["--size", SIZE], resolve("Dense()"))


@cache
def bytes_sent(recipe: str, workers: int) -> float:
    """A step and worker."""
    return estimate_traffic(resolve(recipe, workers), model(), workers=workers).bytes_sent


def times_fewer(recipe: str, workers: int) -> str:
    """Bytes of Dense() over the recipe's."""
    ratio = bytes_sent("Dense()", workers) / bytes_sent(recipe, workers)
    return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def measured(page: str, heading: str, recipe: str, column: str) -> str:
    """A cell of the table below a heading of a page, without its spread; "" where it has no such row."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = text[text.index(f"{heading}\n") :]
    table = re.search(r"^\|.*?(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    assert table is not None
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines())
    return next((row[head.index(column)].split(" ")[0] for row in rows if row[0].strip("`") == recipe), "")


def held_out(task: str, recipe: str) -> str:
    """The loss of a task of docs/benchmarks/compressors.md."""
    return measured("docs/benchmarks/compressors.md", f"### {task}", recipe, "held-out loss")


def local_loss(recipe: str) -> str:
    return measured("docs/benchmarks/local.md", "<!-- written by a program: local -->", recipe, "held-out loss")


def encoding_speed(recipe: str) -> str:
    """GB/s of gradient on one core, compiled, from docs/benchmarks/compressors.md."""
    page = (ROOT / "docs" / "benchmarks" / "compressors.md").read_text(encoding="utf-8")
    for name in (recipe, f"Feedback({recipe})"):
        if found := re.search(rf"^\| {re.escape(name)} \| native \| [\d,]+ \| ([\d.]+) \|", page, re.MULTILINE):
            return found[1]
    return ""


COLUMNS = {  # of the page's tables: the figure that a recipe has there
    "fewer, 4": lambda recipe: times_fewer(recipe, 4),
    "fewer, 32": lambda recipe: times_fewer(recipe, 32),
    "GB/s": encoding_speed,
    "SGD": lambda recipe: held_out("bytelm", recipe),
    "AdamW": lambda recipe: held_out("bytelm-adamw", recipe),
    "loss apart": local_loss,
}


def figures(page: str) -> Iterator[tuple[str, str, str]]:
    """(recipe, column, what the page says), of all its tables."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        for row in rows:
            for column, cell in zip(head, row, strict=True):
                if column in COLUMNS:
                    yield row[0].strip("`"), column, cell


def wrong_figures(page: str) -> list[str]:
    """What the page says, where the code or the measurements say something else."""
    return [
        f"{recipe}, {column}: {said}, not {COLUMNS[column](recipe)}"
        for recipe, column, said in figures(page)
        if said != COLUMNS[column](recipe)
    ]


PAGE = (ROOT / "docs" / "reference" / "trade-offs.md").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_figures_are_those_of_the_code_and_of_the_measurements() -> None:
    assert {column for _, column, _ in figures(PAGE)} == set(COLUMNS)
    assert wrong_figures(PAGE) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`Int8()` | 3.9 | 3.9 | 5.75", "`Int8()` | 4.0 | 3.9 | 5.75"),
        ("`TernGrad()` | 9.6 | 1.2", "`TernGrad()` | 9.6 | 9.6"),
        ("`Int8()` | 3.9 | 3.9 | 5.75", "`Int8()` | 3.9 | 3.9 | 36.7"),
        ("2.726 | 3.075", "2.726 | 2.726"),
        ("20 | 20 | 2.074", "20 | 20 | 1.874"),
    ],
)
def test_other_figures_are_noticed(right: str, wrong: str) -> None:
    assert right in PAGE
    assert len(wrong_figures(PAGE.replace(right, wrong, 1))) == 1


def test_every_technique_is_there() -> None:
    named = set(re.findall(r"\b[A-Z]\w+(?=\()", PAGE))
    assert set(NOUNS) - named == set()
    assert {wish.partition("(")[0] for wish in REQUESTABLE} - set(re.findall(r"`(\w+)(?:\(s\))?`", PAGE)) == set()


def test_its_recipes_are_real() -> None:
    for recipe, _, _ in figures(PAGE):
        resolve(recipe)
