"""What stands for a letter where the terminal's encoding has none for it, such as ASCII in a C locale."""

from __future__ import annotations

import codecs
from io import TextIOWrapper
from typing import TextIO

# The marks of a schedule stay five, and every stand-in is as wide as what it stands for
STAND_INS = {"·": "-", "▲": "^", "═": "=", "▼": "v", "◆": "*", "µ": "u", "…": "."}
SPINNER = range(0x2800, 0x2900)  # what turns before a line that changes
BYTES_KEPT = range(0xDC80, 0xDD00)  # of a file's name that is no text: Python's surrogates for them
ERRORS = "gossamer.plain"


def stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """For `codecs`: what to write for the first letter that cannot be encoded, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if ord(letter) in BYTES_KEPT:
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    if ord(letter) in SPINNER:
        return "*", error.start + 1
    return STAND_INS.get(letter, letter.encode("ascii", "backslashreplace").decode("ascii")), error.start + 1


def write_plainly(*streams: TextIO) -> None:
    """Let these never fail for a letter that they cannot encode; all others are written as they are."""
    codecs.register_error(ERRORS, stand_in)
    for stream in streams:
        if isinstance(stream, TextIOWrapper):  # what a test or a notebook puts in its place has no encoding
            stream.reconfigure(errors=ERRORS)
