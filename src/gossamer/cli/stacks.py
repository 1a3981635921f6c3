"""`gossamer stacks`: the Python stacks of every rank of a run at the latest dump."""

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
    "no worker of {run} has written its stacks. Workers write them when one of them stalls for more than ten seconds "
    "and ten usual steps, and on request: kill -USR1 PID, with the process id of `gossamer run`, requests them from "
    "all workers on its machine; then `gossamer stacks {run}` shows them."
)

NO_FLIGHTS = (
    "no worker of {run} has written its latest operations. Each worker writes them after some seconds in one operation "
    "or between two, and at its end: try again later."
)


@click.command("stacks")
@click.option("--threads", is_flag=True, help="Show all threads, not only the main thread.")
@click.option(
    "--flight-recorder",
    "dump",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the latest operations of all ranks to this folder instead, for `torchfrtrace`.",
)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def stacks_command(run: Path, threads: bool, dump: Path | None) -> None:
    """Show the latest Python stacks of each rank of RUN, a folder of logs; ranks with equal stacks together.

    Workers write their stacks on SIGUSR1, which `gossamer run` forwards to all of its workers, and by themselves when a
    worker has waited for another one for more than ten usual steps and ten seconds (GOSSAMER_HANG_SECONDS).
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
    for line in side_by_side(dumps, steps, threads, notes=_places(run)):
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
        raise click.ClickException(f"the operations of {run} could not be written to {dump}: {problem}") from None
    echo(f"Operations of {len(flights)} ranks in {dump}. Compare them: torchfrtrace {dump}")


def _places(run: Path) -> dict[int, str]:
    """The current or last reported operation of each rank; empty without a store."""
    try:
        db = open_store(run / STORE_FILE, readonly=True)
    except StoreError:
        return {}
    with closing(db):
        return read_places(db)


def _newest(run: Path) -> dict[int, Path]:
    """The newest file of each rank: in the private folder during a run, next to the logs afterwards."""
    paths = [path for place in (run, *run.glob(".run-*")) for path in place.glob("stacks-*-*.txt")]
    ordered = sorted((path for path in paths if path.stat().st_size), key=lambda path: path.stat().st_mtime)
    return {int(path.name.split("-")[1]): path for path in ordered}


def _last_step(folder: Path, rank: int) -> int | None:
    path = event_log_path(folder, rank)
    steps = [entry["step"] for entry in read_entries(path) if entry["kind"] == "steps"] if path.exists() else []
    return steps[-1] if steps else None
