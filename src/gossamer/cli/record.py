"""`gossamer record`: shows a run's record, and makes it from the event logs of a killed run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gossamer.base import bounded_file
from gossamer.base.figures import check_matplotlib
from gossamer.cli.options import output_option
from gossamer.observe.control_sequences import SafeConsole
from gossamer.observe.event_log import LOG_SUFFIX
from gossamer.observe.plot import plot
from gossamer.observe.record import MOST_RECORD_BYTES, Record, recover, write
from gossamer.observe.terminal import rows

NO_RUN = (
    "{path} has neither a record.json nor an event log of a session that trained. Name a run's folder, such as "
    "runs/2026-01-31_12-00-00, or the file of attach(..., record=FILE)."
)


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
    kept = _place(path)
    record, files = _find(path, kept), {}
    if json_file is not None or not kept.exists() or path.name.endswith(LOG_SUFFIX):
        write(json_file or kept, record)
    files["record"] = str(json_file or kept)
    if plot_file is not None:
        plot([record], plot_file)
        files["picture"] = str(plot_file)
    console = SafeConsole(highlight=False)
    for name, value in rows(record, files):
        console.print(f"{name:<26}{value}", soft_wrap=True, markup=False)


def _place(path: Path) -> Path:
    """File of the run's record, whether it exists or not."""
    if path.is_dir():
        return path / "record.json"
    name = path.name
    return path.with_name(name.removesuffix(LOG_SUFFIX) + ".json") if name.endswith(LOG_SUFFIX) else path


def _find(path: Path, kept: Path) -> Record:
    if kept.exists() and not path.name.endswith(LOG_SUFFIX):
        try:
            record: Record = json.loads(bounded_file.read_text(kept, MOST_RECORD_BYTES))
            return record
        except ValueError as problem:
            why = "it is not JSON" if isinstance(problem, json.JSONDecodeError) else str(problem)
            raise click.ClickException(f"{kept} is not a record: {why}.") from None
    found = recover(path)
    if found is None:
        raise click.ClickException(NO_RUN.format(path=path))
    return found
