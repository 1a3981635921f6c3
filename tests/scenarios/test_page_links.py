"""Links on pages lead to files and headings that exist, and every page is in the index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT
from support.prose import of_markdown, prose, words

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Targets within this project."""
    found = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("``", page))
    return [link for link in found if "://" not in link]


GENERATED = re.compile(
    r"reference/(?:cli|errors-by-message|api/[\w.-]+)\.md$"
)  # by the build of the site, which checks them


def dead(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if GENERATED.search(str(target)):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            yield link


def named(text: str) -> set[str]:
    """Pages that a source file, a program or a test names by their path."""
    return set(re.findall(r"(?<![\w./-])docs/[\w./-]+\.md\b", text))


def missing(index: Path, pages: list[Path]) -> set[Path]:
    """Pages that the index does not link to."""
    found = links(index.read_text(encoding="utf-8"))
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in found}
    return {page for page in pages if page.resolve() not in linked and page != index}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(dead(page)) == []


SECTIONS = [ROOT / "docs" / name for name in ("tutorials", "how-to", "reference", "explanation", "benchmarks")]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_page_is_in_the_index_of_its_section(section: Path) -> None:
    assert missing(section / "README.md", sorted(section.rglob("*.md"))) == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = set(re.findall(r"^ +- .*?([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - named == set()


SOURCES = [path for name in ("src", "tests", "benchmarks", "examples") for path in (ROOT / name).rglob("*.py")]


NOT_WRITTEN = {"docs/page.md"}  # by a test in its own folder


def test_pages_that_sources_name_by_path_exist() -> None:
    files = [path for path in [*SOURCES, ROOT / "Makefile", ROOT / "pyproject.toml"] if path != Path(__file__)]
    pages = {(name, path.name) for path in files for name in named(path.read_text(encoding="utf-8")) - NOT_WRITTEN}
    assert {(name, file) for name, file in pages if not (ROOT / name).exists()} == set()


def test_a_page_named_in_a_source_is_seen() -> None:
    assert named("See docs/loops.md, docs/how-to/a-b.md.") == {"docs/loops.md", "docs/how-to/a-b.md"}


def test_pages_that_messages_name_by_title_exist() -> None:
    """Messages name a page as "TITLE" in the documentation, since an installed package has no docs/."""
    titles = {page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in PAGES}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named_titles = {title for text in sources for title in re.findall(r'"([^"\n]+)" in the documentation', text)}
    assert named_titles - titles == set()
    assert len(named_titles) > 5


ANSWERS = [page for folder in ("how-to", "reference") for page in sorted((ROOT / "docs" / folder).rglob("*.md"))]
BRIEF = [page for section in SECTIONS[:2] + SECTIONS[3:4] for page in sorted(section.rglob("*.md"))]
MOST_WORDS = 900  # of prose; code and link targets are not counted


@pytest.mark.parametrize("page", BRIEF, ids=lambda page: page.stem)
def test_pages_of_guides_are_brief(page: Path) -> None:
    assert words(prose(page)) <= MOST_WORDS


@pytest.mark.parametrize("page", BRIEF, ids=lambda page: page.stem)
def test_a_block_of_code_is_near_the_top(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = re.search(r"^(?:```|    \S)", text, re.MULTILINE)
    assert code is not None
    assert words(of_markdown(text[: code.start()])) <= 150


@pytest.mark.parametrize("page", ANSWERS, ids=lambda page: page.stem)
def test_a_page_begins_with_what_it_answers(page: Path) -> None:
    """A question in the first paragraph."""
    title, first = page.read_text(encoding="utf-8").split("\n\n")[:2]
    assert title.startswith("# ")
    assert "?" in first


def test_dead_links_and_forgotten_pages_are_noticed(tmp_path: Path) -> None:
    index, page = tmp_path / "README.md", tmp_path / "page.md"
    page.write_text("# A page, of two words\n\n[up](README.md) `[code](none.md)` [itself](#a-page-of-two-words)")
    index.write_text("# Pages\n\n[page](page.md#a-page-of-two-words) [web](https://example.org)")
    assert [*dead(index), *dead(page)] == []
    assert missing(index, [index, page]) == set()
    index.write_text("# Pages\n\n[lost](lost.md) [page](page.md#a-page) ![picture](page.png)")
    assert list(dead(index)) == ["lost.md", "page.md#a-page", "page.png"]
    index.write_text("# Pages\n\nNone.")
    assert missing(index, [index, page]) == {page}
