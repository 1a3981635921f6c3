"""Reporting: decides whether progress is shown and a record written by a session, by its launcher, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from gossamer.errors import AttachError
from gossamer.launch.logs.run_files import RUN_DIRECTORY
from gossamer.observe import reporter
from gossamer.world import World

RecordOption = str | os.PathLike[str] | Literal[False] | None
RECORD, QUIET = "GOSSAMER_RECORD", "GOSSAMER_QUIET"


def begin_reporting(record: RecordOption, world: World) -> str:
    """Begin to report, on rank 0, the session that is about to be attached; returns where its record goes, or "".

    Raises AttachError where that cannot be written.
    """
    path = record_path(record)
    if world.is_first:
        try:
            reporter.begin(lines=shows_lines(record, world.size), record=path)
        except OSError as error:
            raise AttachError(
                f"the record of this run would go to {path}, and nothing can be written there ({error.strerror}), so "
                'all that is logged would be lost. Name another place, such as record="record.json".'
            ) from None
    if path is None and RUN_DIRECTORY in os.environ:
        path = Path(os.environ[RUN_DIRECTORY]).parent / "record.json"
    return str(path or "")


def record_path(record: RecordOption) -> Path | None:
    """The variable beats the script, as with recipes; empty, it means nowhere."""
    written = os.environ.get(RECORD, record)
    if not written:
        return None
    if not isinstance(written, str | os.PathLike):
        raise AttachError(f'record={written!r} names no file, so nothing is recorded. Write record="record.json".')
    return Path(written).absolute()


def shows_lines(record: RecordOption, world: int) -> bool:
    """A world of one stays as quiet as plain training, unless it is asked not to."""
    quiet = os.environ.get(QUIET, "")
    return record is not False and (world > 1 if not quiet else quiet == "0")
