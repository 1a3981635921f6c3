"""Reporting: decides whether progress is shown and a record written by a session, by its launcher, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from gossamer.base.run_files import RUN_DIRECTORY
from gossamer.comm.elastic.joined_run import is_elastic
from gossamer.errors import AttachError
from gossamer.observe import reporter
from gossamer.observe.exporters import destination
from gossamer.observe.exporters.destination import Destination, RankPlace, read_destination, read_destinations
from gossamer.train.world_state import WorldState

RecordOption = str | os.PathLike[str] | Literal[False] | None
RECORD, QUIET, LOG_TO = "GOSSAMER_RECORD", "GOSSAMER_QUIET", "GOSSAMER_LOG_TO"


def begin_reporting(record: RecordOption, world: WorldState, log_to: Iterable[str] = ()) -> str:
    """Begin to report, on rank 0, the session that is about to be attached; returns where its record goes, or "".

    And bring the numbers of every rank where `log_to` says. Raises AttachError where the record cannot be written, and
    for what is no destination.
    """
    path, destinations = record_path(record), log_destinations(log_to)
    destination.end()
    if world.is_first:
        try:
            reporter.begin(lines=shows_lines(record, world.size), record=path)
        except OSError as error:
            raise AttachError(
                f"the record of this run would go to {path}, and nothing can be written there ({error.strerror}), so "
                'all that is logged would be lost. Name another place, such as record="record.json".'
            ) from None
    destination.begin(destinations, RankPlace(_lasting_rank(world), world.local_rank))
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


def log_destinations(log_to: Iterable[str]) -> tuple[Destination, ...]:
    """The variable beats the script, as with records; empty, it means nowhere."""
    text = os.environ.get(LOG_TO)
    texts = [log_to] if isinstance(log_to, str) else log_to
    try:
        return tuple(map(read_destination, texts)) if text is None else read_destinations(text)
    except ValueError as problem:
        raise AttachError(f"{LOG_TO if text is not None else 'log_to'}: {problem}") from None


def _lasting_rank(world: WorldState) -> int:
    """Where workers come and go and are numbered anew, the number that this one was started with."""
    return int(os.environ["RANK"]) if is_elastic() and "RANK" in os.environ else world.rank
