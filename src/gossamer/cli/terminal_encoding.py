"""Terminal encoding: stand-ins for characters that it cannot encode, such as those of a schedule in a C locale."""

from __future__ import annotations

import codecs
from io import TextIOWrapper
from typing import TextIO

# The marks of a schedule stay five, and every stand-in is as wide as what it stands for
STAND_INS = {"·": "-", "▲": "^", "═": "=", "▼": "v", "◆": "*", "µ": "u", "…": "."}
SPINNER = range(0x2800, 0x2900)  # what turns before a line that changes
BYTES_KEPT = range(0xDC80, 0xDD00)  # Python's surrogates for bytes of a file's name that are no text
ERRORS = "gossamer.plain"


def stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler for `codecs`: the stand-in for the first character that cannot be encoded, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if ord(letter) in BYTES_KEPT:
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    if ord(letter) in SPINNER:
        return "*", error.start + 1
    return STAND_INS.get(letter, letter.encode("ascii", "backslashreplace").decode("ascii")), error.start + 1


def write_plainly(*streams: TextIO) -> None:
    """Make these streams write stand-ins for characters that they cannot encode, instead of failing."""
    codecs.register_error(ERRORS, stand_in)
    for stream in streams:
        if isinstance(stream, TextIOWrapper):  # what a test or a notebook puts in its place has no encoding
            stream.reconfigure(errors=ERRORS)
