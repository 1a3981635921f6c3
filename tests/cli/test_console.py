"""Text that breaks between words, at any width."""

from __future__ import annotations

import os
import re
import sys
from io import StringIO

import pytest
from click.testing import CliRunner
from support.paths import ROOT

from gossamer.cli import console
from gossamer.cli.console import FILE_COLUMNS, columns, echo, in_columns, print_text, wrapped
from gossamer.cli.main import main
from gossamer.cli.recipes import recipes

SENTENCE = "it ended with exit code 7, and there is no-one (of them all) left to say why"


@pytest.mark.parametrize("width", [30, 80, 100, 120])
def test_lines_break_between_words_and_continue_below_their_beginning(width: int) -> None:
    text = f"rank 1 failed: {SENTENCE}\n\n    {SENTENCE} {SENTENCE}"
    lines = wrapped(text, width).split("\n")
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == text.split()
    blank = lines.index("")
    assert all(line.startswith("    ") for line in lines[blank + 1 :])
    assert not any(line.startswith(" ") for line in lines[:blank])


def test_what_commands_print_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("Error: client \x1b[2J7\x07 said: bad data")
    echo("round 1, \x1b]0;title\x07clients 1\x1b[1A")
    said = capsys.readouterr()
    assert said.err == "Error: client 7 said: bad data\n"
    assert said.out == "round 1, clients 1\n"


def test_commands_use_the_console_that_leaves_control_sequences_out() -> None:
    sources = [*(ROOT / "src/gossamer/cli").glob("*.py"), *(ROOT / "src/gossamer/watch").glob("*.py")]
    assert sources
    assert [path.name for path in sources if re.search(r"(?<![A-Za-z])Console\(", path.read_text())] == []


# Files that call click.echo, and what they print by it
PRINT_BY_CLICK = {
    "console.py": "what is stripped there",
    "federate_server.py": "a line of a roster, without an end",
    "run_training.py": "a command to copy, and a traceback that is stripped",
}


def test_commands_print_text_by_the_function_that_leaves_control_sequences_out() -> None:
    sources = [path for path in (ROOT / "src/gossamer/cli").glob("*.py") if "click.echo(" in path.read_text()]
    assert {path.name for path in sources} == {*PRINT_BY_CLICK}


def test_a_word_that_is_longer_stays_whole() -> None:
    path = "/somewhere/" + "deep/" * 10 + "record.json"
    assert path in wrapped(f"the record is in {path}", 40).split("\n")


@pytest.mark.parametrize("width", [40, 80])
def test_sentences_stand_in_a_column_of_their_own_or_below(width: int) -> None:
    terms = [("TopK(density=0.01)", SENTENCE), ("Int8()", SENTENCE)]
    lines = "\n".join(in_columns(terms, width)).split("\n")
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line[2] != " "] == ["TopK(density=0.01)", "Int8()"]
    begins = {len(line) - len(line.lstrip()) for line in lines if line[2] == " "}
    assert begins == {22 if width == 80 else 6}


@pytest.mark.parametrize("width", [80, 100, 120])
def test_recipes_break_no_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "9999")
    words = CliRunner().invoke(recipes).output.split()
    monkeypatch.setenv("COLUMNS", str(width))
    said = CliRunner().invoke(recipes).output
    assert said.split() == words
    assert max(map(len, said.splitlines())) <= width


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def test_the_width_is_the_terminals_or_a_fixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: os.terminal_size((97, 20)))
    assert (columns(Terminal()), columns(StringIO())) == (97, FILE_COLUMNS)
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: os.terminal_size((0, 0)))
    assert columns(Terminal()) == FILE_COLUMNS  # as of `ssh -tt` in a script, which has no size to hand on
    monkeypatch.setenv("COLUMNS", "40")
    assert (columns(Terminal()), columns(StringIO())) == (40, 40)
    monkeypatch.setenv("COLUMNS", "\u00b2")  # a digit to str.isdigit, but not to int
    assert columns(StringIO()) == FILE_COLUMNS


@pytest.mark.parametrize(
    ("words", "exit_code"), [(["run", "missing.py"], 2), (["explain", "DDP("], 1), (["--help"], 0), (["nothing"], 2)]
)
def test_what_is_refused_breaks_between_words(
    words: list[str], exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "argv", ["gossamer", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == exit_code
    assert "Traceback" not in said.err
    assert ("Error:" in said.err) == bool(exit_code)
    assert all(len(line) <= 60 or " " not in line.strip() for line in said.err.splitlines())


def test_what_is_said_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "columns", lambda stream: 20)
    print_text("one sentence of six words")
    assert capsys.readouterr().err == "one sentence of six\nwords\n"
