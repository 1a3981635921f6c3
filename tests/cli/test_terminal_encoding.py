"""Output on a terminal whose encoding has not every letter."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from gossamer.base import units
from gossamer.cli.main import STAND_INS, write_plainly
from gossamer.plan.estimate.timeline import AT_ONCE, LANDS, LEAVES, TRAINS, TRAVELS


def written(text: str, encoding: str, errors: str = "strict") -> bytes:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    if errors == "strict":
        write_plainly(stream)
    stream.write(text)
    stream.flush()
    return stream.buffer.getvalue()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("step 3 · 2 steps/s", b"step 3 - 2 steps/s"),
        ("···▲═▼◆", b"---^=v*"),
        ("12 µs, cut…", b"12 us, cut."),
        ("\N{BRAILLE PATTERN DOTS-1} waiting", b"* waiting"),
        ("ümläut", rb"\xfcml\xe4ut"),
        ("name\udcff", b"name\xff"),
    ],
)
def test_letters_that_the_encoding_lacks_have_stand_ins(text: str, plain: bytes) -> None:
    assert written(text, "ascii") == plain
    with pytest.raises(UnicodeEncodeError):
        written(text, "ascii", errors="surrogatepass")  # as without stand-ins


def test_letters_that_the_encoding_has_stay() -> None:
    assert written("··▲ µs ümläut", "utf-8") == "··▲ µs ümläut".encode()
    assert written("· µ ▲", "latin-1") == b"\xb7 \xb5 ^"


def test_what_is_printed_has_a_stand_in_of_its_own() -> None:
    marks = TRAINS + LEAVES + TRAVELS + LANDS + AT_ONCE
    assert len({STAND_INS[mark] for mark in marks}) == len(marks)
    assert all(letter.isascii() or letter in STAND_INS for _, unit in units.SECOND_UNITS for letter in unit)


@pytest.mark.processes
def test_the_command_line_writes_ascii_where_nothing_else_is_there() -> None:
    command = [sys.executable, "-m", "gossamer", "explain", "DiLoCo(8)", "--parameters", "1000"]
    said = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=200, check=True
    ).stdout.decode("ascii")
    assert "- trains apart" in said
