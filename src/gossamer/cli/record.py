"""`gossamer record`: shows a run's record, and makes it from the event logs of a killed run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from gossamer.base.figures import check_matplotlib
from gossamer.cli.options import output_option
from gossamer.errors import StoreError
from gossamer.observe.control_sequences import SafeConsole
from gossamer.observe.event_log import LOG_SUFFIX
from gossamer.observe.plot import plot
from gossamer.observe.record import has_newer_logs, write
from gossamer.observe.saved_record import NAME_A_RUN, Record, record_file
from gossamer.observe.terminal import rows


@click.command("record")
@output_option("json", "Write the record to this file.  [default: the run's own]")
@output_option("plot", "Draw its curves (PNG).")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
def record_command(path: Path, json_file: Path | None, plot_file: Path | None) -> None:
    """Show the record in PATH: a run's folder, a record, or an event log (FILE.events.jsonl).

    If all processes of a run were killed, its event logs have the data until a second before, and the record is made
    from them.
    """
    if plot_file is not None:
        check_matplotlib()
    kept, files = record_file(path), dict[str, str]()
    try:
        record = Record.load(path)
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    with _fields_of(kept):
        shown = list(rows(record, {}))
    made = not kept.exists() or path.name.endswith(LOG_SUFFIX) or has_newer_logs(path, kept)
    unwritten = _written(json_file or kept, record) if json_file is not None or made else None
    if unwritten is None:
        files["record"] = str(json_file or kept)
    if plot_file is not None:
        with _fields_of(kept):
            plot([record], plot_file)
        files["picture"] = str(plot_file)
    console = SafeConsole(highlight=False)
    for name, value in (*shown, *files.items()):
        console.print(f"{name:<26}{value}", soft_wrap=True, markup=False)
    if unwritten is not None:
        raise click.ClickException(unwritten)


@contextmanager
def _fields_of(file: Path) -> Iterator[None]:
    """Raise ClickException where the record of a file lacks a field, or has one of another type."""
    try:
        yield
    except KeyError as missing:
        raise click.ClickException(f"{file} is not the record of a run: it has no {missing}. {NAME_A_RUN}") from None
    except (TypeError, AttributeError, ArithmeticError, ValueError) as problem:
        raise click.ClickException(f"{file} is not the record of a run: {problem}. {NAME_A_RUN}") from problem


def _written(file: Path, record: Record) -> str | None:
    """Write the record. Returns None, or why it was not written."""
    try:
        write(file, record)
    except OSError as error:
        return f"the record was not written to {file} ({error.strerror}). Name another file: --json FILE"
    return None
