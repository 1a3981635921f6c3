"""`gossamer stacks`: where every rank of a run is, in Python, when last it was asked."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import click

from gossamer.cli.console import echo
from gossamer.errors import StoreError
from gossamer.observe.event_log import event_log_path, read_entries
from gossamer.observe.flight_dump import Dump, read_flights, write_for_torchfrtrace
from gossamer.observe.stacks import newest_dump, read_stacks, side_by_side
from gossamer.observe.telemetry import STORE_FILE, open_store
from gossamer.observe.telemetry.hangs import read_places

NOTHING = (
    "no worker of {run} has written its stacks. They do where one is waited for over ten seconds and ten usual steps, "
    "and when asked: "
    "kill -USR1 PID, with the number of `gossamer run`'s process, asks all workers on its machine, and then "
    "`gossamer stacks {run}` shows them."
)

NO_FLIGHTS = (
    "no worker of {run} has written its latest operations. Each does when it has been at one of them, or between two, "
    "for some seconds, and when it ends: try again then."
)


@click.command("stacks")
@click.option("--threads", is_flag=True, help="Show all threads, not the main one alone.")
@click.option(
    "--flight-recorder",
    "dump",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the latest operations of all ranks there instead, for `torchfrtrace`.",
)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def stacks_command(run: Path, threads: bool, dump: Path | None) -> None:
    """Show where each rank of RUN, a folder of logs, was in Python when last it was asked; equal stacks together.

    Workers write their stacks on SIGUSR1, which `gossamer run` hands on to all of its own, and by themselves once a
    worker has waited for another for longer than ten usual steps, and than ten seconds (GOSSAMER_HANG_SECONDS).
    """
    if dump is not None:
        _dump_flights(run, dump)
        return
    found = _newest(run)
    dumps = {rank: threads_ for rank, path in found.items() if (threads_ := newest_dump(read_stacks(path)))}
    if not dumps:
        raise click.ClickException(NOTHING.format(run=run))
    written = max(found[rank].stat().st_mtime for rank in dumps)
    echo(f"Written {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(written))}, innermost line last")
    steps = {rank: step for rank in dumps if (step := _last_step(found[rank].parent, rank)) is not None}
    for line in side_by_side(dumps, steps, threads, beside=_places(run)):
        echo(line)


def _dump_flights(run: Path, dump: Path) -> None:
    flights: dict[int, Dump] = {}
    try:
        for place in (run, *run.glob(".run-*")):
            flights |= read_flights(place)
        if not flights:
            raise click.ClickException(NO_FLIGHTS.format(run=run))
        write_for_torchfrtrace(flights, dump)
    except (OSError, ValueError) as problem:
        raise click.ClickException(f"the operations of {run} could not be written into {dump}: {problem}") from None
    echo(f"Operations of {len(flights)} ranks in {dump}. Compare them: torchfrtrace {dump}")


def _places(run: Path) -> dict[int, str]:
    """The operations that ranks are in, or were when last they told; none without a store."""
    try:
        db = open_store(run / STORE_FILE, readonly=True)
    except StoreError:
        return {}
    with closing(db):
        return read_places(db)


def _newest(run: Path) -> dict[int, Path]:
    """The newest file of each rank: of a run that goes on in a folder within, afterwards beside the logs."""
    paths = [path for place in (run, *run.glob(".run-*")) for path in place.glob("stacks-*-*.txt")]
    ordered = sorted((path for path in paths if path.stat().st_size), key=lambda path: path.stat().st_mtime)
    return {int(path.name.split("-")[1]): path for path in ordered}


def _last_step(folder: Path, rank: int) -> int | None:
    path = event_log_path(folder, rank)
    steps = [entry["step"] for entry in read_entries(path) if entry["kind"] == "steps"] if path.exists() else []
    return steps[-1] if steps else None
