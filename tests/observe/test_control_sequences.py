from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from gossamer.observe.control_sequences import SafeConsole, in_one_line, without_controls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[1;38:5:208mbright\x1b[m", "bright"),
        ("\x1b[2Jcleared\x1b[H", "cleared"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;https://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP+q544e\x1b\\after", "after"),
        ("\x1bcreset \x1b(0line\x1b[?1049h", "reset line"),
        ("bell\x07 back\x08\x0b C1\x9b31m\x85", "bell back C1"),
        ("cut\x1b[3", "cut"),
        ("cut\x1b", "cut"),
        ("a\ttab, two\nlines, größer ✓", "a\ttab, two\nlines, größer ✓"),
    ],
)
def test_nothing_but_text_is_left(text: str, shown: str) -> None:
    assert without_controls(text) == shown


def test_colors_stay_where_they_are_wanted() -> None:
    assert without_controls("\x1b[31mred\x1b[0m\x1b[2K\x1b[3A", colors=True) == "\x1b[31mred\x1b[0m"
    assert without_controls("\x1b[31\x07m", colors=True) == "m"


def test_a_name_stays_in_its_line() -> None:
    assert in_one_line("loss\nworkers agree  yes\x1b[2J\r") == "loss workers agree  yes"


HOSTILE = "loss\x1b[2J\x1b]0;title\x07\x08"


@pytest.mark.parametrize("kind", ["text", "styled", "cell"])
def test_no_text_on_a_safe_console_steers_the_terminal(kind: str) -> None:
    table = Table("name", box=None)
    table.add_row(HOSTILE)
    shown = {"text": HOSTILE, "styled": Text(HOSTILE, style="red"), "cell": table}[kind]
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, color_system="standard", width=60, highlight=False)
    with console.status("waiting") as status:
        console.print(shown, markup=False)
        status.update(Text(HOSTILE))
    said = out.getvalue()
    assert "loss" in said
    assert not any(sequence in said for sequence in ("\x1b[2J", "\x1b]0", "title", "\x07", "\x08"))
    assert said.count("\x1b[2K") > 1, "Rich erases its own line, before others and at the end"
    assert ("\x1b[31m" in said) == (kind == "styled")


@pytest.mark.parametrize("kind", ["text", "cell", "header"])
def test_brackets_and_colons_in_text_are_shown_as_they_are(kind: str) -> None:
    odd = "accuracy[top1] 1:x:2 [/mean]"
    table = Table(odd if kind == "header" else "name", box=None)
    table.add_row(odd if kind == "cell" else "1.0")
    out = io.StringIO()
    SafeConsole(file=out, width=60, highlight=False).print(odd if kind == "text" else table)
    assert odd in out.getvalue()
