"""Plain technical English: pages, docstrings, comments and messages avoid words that have to be decoded."""

import ast
import re
from collections.abc import Iterator
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
        ROOT / "SECURITY.md",
        ROOT / "CODE_OF_CONDUCT.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ],
    "examples": [ROOT / "examples"],
    **{place.name: [place] for place in sorted(PACKAGE.iterdir()) if place.is_dir() and place.name != "__pycache__"},
    "root modules": sorted(PACKAGE.glob("*.py")),
}


@pytest.mark.nightly  # and in make check
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


# Identifiers of src/ with a banned word, of which some are fields of files or of messages. The number may only fall.
MOST_BANNED_IDENTIFIERS = 11
BANNED_TOKENS = re.compile(
    r"(?:^|_)(?:says?|said|tells?|told|hears?|heard|ow(?:e|es|ed|ing)|foret(?:ell|old|elling)|beside|nobody|who|whose|whom"
    r"|what|wish(?:es|ed)?|stands?|lies?|lay|talks?|speaks?|mine|theirs|ours|anew)(?:_|$)",
    re.IGNORECASE,
)


def identifiers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


@pytest.mark.nightly  # and in make check
def test_identifiers_with_banned_words_become_no_more() -> None:
    found = {name for path in files_below(PACKAGE) if path.suffix == ".py" for name in identifiers(path.read_text())}
    assert len(banned_names := sorted(filter(BANNED_TOKENS.search, found))) <= MOST_BANNED_IDENTIFIERS, banned_names


def test_the_check_of_identifiers_finds_functions_arguments_and_variables() -> None:
    source = "def tell_rank(self, said): self.owed = beside = 1\nclass Standing: pass\n"
    assert {*filter(BANNED_TOKENS.search, identifiers(source))} == {"tell_rank", "said", "owed", "beside"}


def test_the_check_reads_words_between_values_of_a_formatted_string() -> None:
    assert set(banned(of_python('f"{rank} says {x}, {y} talks"'))) == {"say, tell", "talk"}
