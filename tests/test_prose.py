"""Plain technical English: pages, docstrings, comments and messages avoid words that have to be decoded."""

from pathlib import Path

import pytest
from support.paths import ROOT
from support.prose import banned, files_below, of_markdown, of_python, prose, relatives_per_thousand

MOST_RELATIVES = 3.0  # "what", "who" and their kin per 1,000 words
PACKAGE = ROOT / "src" / "gossamer"
AREAS = {
    "pages": [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ],
    "examples": [ROOT / "examples"],
    **{place.name: [place] for place in sorted(PACKAGE.iterdir()) if place.is_dir() and place.name != "__pycache__"},
    "root modules": sorted(PACKAGE.glob("*.py")),
}


@pytest.mark.parametrize("area", sorted(AREAS))
def test_prose_uses_plain_technical_words(area: str) -> None:
    text = "\n".join(prose(path) for path in files_below(*AREAS[area]))
    assert (dict(banned(text)), relatives_per_thousand(text) <= MOST_RELATIVES) == ({}, True)


def test_the_check_finds_banned_words_in_docstrings_comments_and_messages() -> None:
    source = '''
def f():
    """Rank 3 says no."""
    # it stands in a file
    raise ValueError("nobody would talk to it")
'''
    assert set(banned(of_python(source))) == {"say, tell", "stand", "nobody, somebody, whoever", "talk"}


def test_the_check_reads_no_code() -> None:
    assert not banned(of_markdown("`say` it:\n\n```python\nsay('who stands beside me')\n```\n"))
    assert not banned(of_python("say = owed = {'beside': 1}"))


def test_relatives_are_counted_per_thousand_words() -> None:
    assert relatives_per_thousand("what " + "word " * 249) == 4.0


def test_every_area_has_files() -> None:
    assert [area for area, places in AREAS.items() if not files_below(*map(Path, places))] == []
