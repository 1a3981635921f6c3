"""Pages of the reference name all that the sources have, and generated pages contain what they promise."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sqlite3
from functools import cache
from html import unescape

import pytest
from docs.site import pages
from support.page_commands import variables
from support.paths import ROOT

from gossamer import events
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.observe.exporters.points import STEP_CURVES
from gossamer.observe.exporters.totals import COUNTERS, STEP, STEP_DURATION, WORKERS
from gossamer.observe.rank_record import RankRecord
from gossamer.observe.record import merge
from gossamer.observe.telemetry.store import TABLES

REFERENCE = ROOT / "docs" / "reference"
messages_page = cache(pages.messages_page)  # reads all sources


def read(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def first_cells(text: str) -> set[str]:
    """Names in code in the first column of all tables."""
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


# -- environment variables -------------------------------------------------------------------------


def test_every_variable_that_the_sources_read_is_on_the_page_and_no_other() -> None:
    named = {name for name in first_cells(read("environment.md")) if name.startswith("GOSSAMER_")}
    assert named == {name for name in variables() if name.startswith("GOSSAMER_")}


# -- record and metrics ----------------------------------------------------------------------------


def test_every_field_of_the_record_is_on_the_page_and_no_other() -> None:
    parts = ("median", "p90", "compute", "waiting", "encode", "wire", "decode")
    times = {f"{part}_seconds": 0.0 for part in parts}
    rank = RankRecord(
        rank=0, world=1, recipe="Dense()", parameters=1, steps=1, skipped_steps=0, seconds=1.0, bytes_sent=0.0, **times
    )
    fields, _, metrics = read("record.md").partition("## Exported metrics")
    assert first_cells(fields) == set(merge([rank]))
    exported = {each.name for each in (*COUNTERS, STEP, STEP_DURATION, WORKERS)} | set(STEP_CURVES)
    assert exported - set(re.findall(r"`([\w./]+)`", metrics)) == set()


# -- run.sqlite ------------------------------------------------------------------------------------


def columns(schema: str) -> dict[str, set[str]]:
    db = sqlite3.connect(":memory:")
    db.executescript(schema)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {name: {row[1] for row in db.execute(f"PRAGMA table_info({name})")} for name in tables}
    db.close()
    return found


INTERNAL = {"source"}  # how far each file was read


def described(page: str) -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(\w+)` \| (.*)$", page.partition("| column | meaning |")[0], re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", row)) for name, row in rows}


@pytest.mark.parametrize("table", sorted(columns(TABLES).keys() - INTERNAL))
def test_every_column_of_the_store_is_on_the_page(table: str) -> None:
    assert columns(TABLES)[table] - described(read("run-sqlite.md"))[table] - {"id", table} == set()


def test_a_column_that_the_page_lacks_is_seen() -> None:
    page = read("run-sqlite.md").replace("`waits_for`, ", "")
    assert columns(TABLES)["rank"] - described(page)["rank"] - {"rank"} == {"waits_for"}


# -- errors ----------------------------------------------------------------------------------------

ROW = re.compile(r"^\| `(\w+)` \| (.*?) \|", re.MULTILINE)


def absent(page: str, messages: str) -> list[tuple[str, str]]:
    """Rows with key words that no message of their class contains; `...` stands for any words."""
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", messages, re.MULTILINE | re.DOTALL))
    return [
        (kind, words)
        for kind, words in ROW.findall(page)
        if not re.search(re.escape(words.replace("`", "")).replace(r"\.\.\.", ".*"), sections.get(kind, ""))
    ]


@pytest.mark.nightly
def test_key_words_of_the_page_are_in_a_message_of_their_class() -> None:
    messages = unescape(re.sub(r"\\(.)", r"\1", messages_page()))
    assert absent(read("troubleshooting.md"), messages) == []
    assert absent("| `PeerLost` | no such words | cause |\n", messages) == [("PeerLost", "no such words")]


def test_messages_of_constants_and_of_literals_are_listed() -> None:
    source = """
WHY = "the file {path} cannot be read. Write another"
def f(path):
    require(path, f"path must not be empty, got {path}")
    raise StoreError(WHY.format(path=path))
    return PeerLost("rank 3 left " "the run")
"""
    assert set(pages.raised(ast.parse(source))) == {
        ("StoreError", "the file ... cannot be read. Write another"),
        ("ValueError", "path must not be empty, got ..."),
        ("PeerLost", "rank 3 left the run"),
    }


@pytest.mark.nightly
def test_long_lists_of_messages_are_divided_by_area() -> None:
    loop = messages_page().partition("\n## LoopError\n")[2].partition("\n## ")[0]
    assert {"### Session and training loop", "### Gradients of a step", "### JAX"} <= set(loop.splitlines())
    assert "### Other" not in messages_page()
    assert pages.area(pages.SOURCE / "train" / "session" / "average.py") == "Session and training loop"
    assert pages.area(pages.SOURCE / "train" / "new.py") == "Training"


# -- the command line and the API --------------------------------------------------------------------


def test_every_command_and_option_is_in_the_reference() -> None:
    page = pages.commands_page()
    assert {"## gossamer run", "## gossamer advise", "### gossamer federate serve"} <= set(page.splitlines())
    assert "| `--max-restarts" in page
    assert "`--network" in page
    assert "`--late [drop|count]`" in page


def test_special_characters_of_help_texts_are_escaped_for_html_and_tables() -> None:
    assert pages.escaped("1<=x, a|b, *c* & `d`") == r"1&lt;=x, a&#124;b, \*c\* &amp; \`d\`"


def test_every_public_name_has_an_entry() -> None:
    generated = "".join(text for path, text in pages.generated() if path.startswith(pages.API))
    entries = set(re.findall(r"^::: ([\w.]+)$", generated, re.MULTILINE))
    wanted = {
        f"{module}.{name}"
        for module in pages.modules()
        if not module.startswith(pages.HOROVOD)
        for name in pages.PUBLIC[module]
        if not name.startswith("__") and f"{module}.{name}" not in pages.modules() and name not in SUBPACKAGES
    }
    assert wanted - entries == set()


COMPRESSORS = sorted(name for name, noun in NOUNS.items() if noun.kind == "compressor")


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_equation_law_and_source_of_a_compressor_are_one_block(name: str) -> None:
    docstrings = pytest.importorskip("docs.site.docstrings")
    text = docstrings.as_markdown(inspect.getdoc(NOUNS[name]) or "")
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    assert all(re.search(rf"^{part}: ", blocks[0], re.MULTILINE) for part in ("law", "bytes", "source"))


def test_examples_of_docstrings_become_blocks_of_code() -> None:
    docstrings = pytest.importorskip("docs.site.docstrings")
    text = docstrings.as_markdown("One.\n\nExample:\n    >>> 1 + 1\n    2\n")
    assert text == "One.\n\n**Example**\n\n```pycon\n>>> 1 + 1\n2\n```\n"


@pytest.mark.nightly
def test_the_page_of_events_describes_every_field() -> None:
    pytest.importorskip("docs.site.docstrings")
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "site" / "docstrings.py"))
    module = griffe.load("gossamer.events", search_paths=[ROOT / "src"], extensions=extensions)
    missing = {
        f"{name}.{field.name}"
        for name in module.exports
        if dataclasses.is_dataclass(kind := getattr(events, name))
        for field in dataclasses.fields(kind)
        if field.name in kind.__annotations__ and f"    {field.name}: " not in module[name].docstring.value
    }
    assert missing == set()


SUBPACKAGES = {"integrations", "horovod"}


# -- links -----------------------------------------------------------------------------------------


def test_links_that_leave_the_docs_lead_to_copies_or_become_text() -> None:
    rewritten = pages.within_site("how-to/x.md", "[a](../../examples/demo.py) [b](../../tests/laws) [c](y.md)")
    assert rewritten == "[a](../source/examples/demo.py) b [c](y.md)"
    assert pages.within_site("x.md", "[e](../CONTRIBUTING.md#notes)") == "[e](contributing.md#notes)"


def test_links_between_sections_of_the_docs_are_kept() -> None:
    text = "[choose](../how-to/how-to-choose.md#rules) ![picture](../benchmarks/demo.png)"
    assert pages.within_site("reference/recipes.md", text) == text


def test_links_with_a_path_as_text_get_the_title_of_their_page() -> None:
    titles = {"how-to/launch.md": "Starting a run"}
    assert pages.with_titles("how-to/x.md", "see [launch.md](launch.md#slurm)", titles) == (
        "see [Starting a run](launch.md#slurm)"
    )


def test_resources_of_other_servers_are_found_and_links_are_not() -> None:
    assert pages.external('<a href="https://example.org">x</a><script src="assets/a.js"></script>') == []
    html = '<link rel="stylesheet" href="//fonts.example.org/a.css"><img alt="" src="https://example.org/a.png">'
    assert pages.external(html) == ["//fonts.example.org/a.css", "https://example.org/a.png"]
