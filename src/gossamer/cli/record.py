"""`gossamer record`: shows a run's record, and makes it from the event logs of a killed run."""

from __future__ import annotations

from pathlib import Path

import click

from gossamer.base.figures import check_matplotlib
from gossamer.cli.options import output_option
from gossamer.errors import StoreError
from gossamer.observe.control_sequences import SafeConsole
from gossamer.observe.event_log import LOG_SUFFIX
from gossamer.observe.plot import plot
from gossamer.observe.record import has_newer_logs, write
from gossamer.observe.saved_record import Record, record_file
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
    kept = record_file(path)
    try:
        record, files = Record.load(path), {}
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    made = not kept.exists() or path.name.endswith(LOG_SUFFIX) or has_newer_logs(path, kept)
    if json_file is not None or made:
        write(json_file or kept, record)
    files["record"] = str(json_file or kept)
    if plot_file is not None:
        plot([record], plot_file)
        files["picture"] = str(plot_file)
    console = SafeConsole(highlight=False)
    for name, value in rows(record, files):
        console.print(f"{name:<26}{value}", soft_wrap=True, markup=False)
