"""Files that another process writes: read up to a limit of their size, and replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 2**26  # of a small file, such as a manifest, a report, an advice


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes.

    The limit is checked while reading: a device such as /dev/zero has no size, and a file may grow.

    Raises:
        ValueError: the file has more bytes.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        too_large = os.fstat(file.fileno()).st_size > most
        content = b"" if too_large else file.read(most + 1)
    if too_large or len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


def read_text(path: Path, most: int = MOST_BYTES, errors: str = "strict") -> str:
    """The UTF-8 text of a file of at most `most` bytes. Raises ValueError and OSError as `read_bytes` does."""
    return read_bytes(path, most).decode("utf-8", errors)


def read_end(path: Path, most: int) -> bytes:
    """The last `most` bytes of a file, or all where it has fewer. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - most))
        return file.read(most)


def read_lines(path: Path, most: int) -> Iterator[bytes]:
    """The lines of a file, with their ends. A line of more than `most` bytes comes in several pieces."""
    with path.open("rb") as file:
        while line := file.readline(most):
            yield line


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace a file: readers find its previous content or all of the new one, also if other processes write it, too.

    Raises OSError. Then the previous file remains, and the disk has no part of the new one.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
