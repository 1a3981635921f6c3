"""Terminal encoding: replaces characters that the output's encoding lacks, such as ASCII in a C locale."""

from __future__ import annotations

import codecs
from io import TextIOWrapper
from typing import TextIO

# The marks of a schedule stay five, and every replacement is as wide as its character
STAND_INS = {"·": "-", "▲": "^", "═": "=", "▼": "v", "◆": "*", "µ": "u", "…": "."}
SPINNER = range(0x2800, 0x2900)  # Braille patterns, before a line that changes
BYTES_KEPT = range(0xDC80, 0xDD00)  # of a file's name that is no text: Python's surrogates for them
ERRORS = "gossamer.plain"


def stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler for `codecs`: the replacement of the first character, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if ord(character) in BYTES_KEPT:
        return bytes([ord(character) - 0xDC00]), error.start + 1
    if ord(character) in SPINNER:
        return "*", error.start + 1
    return STAND_INS.get(character, character.encode("ascii", "backslashreplace").decode("ascii")), error.start + 1


def write_plainly(*streams: TextIO) -> None:
    """Let these streams replace characters that they cannot encode instead of failing."""
    codecs.register_error(ERRORS, stand_in)
    for stream in streams:
        if isinstance(stream, TextIOWrapper):  # the replacement that a test or a notebook installs has no encoding
            stream.reconfigure(errors=ERRORS)
