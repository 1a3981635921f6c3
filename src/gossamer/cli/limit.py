"""`gossamer limit`: shows and changes the bandwidth limits of a run on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from gossamer.cli.console import echo
from gossamer.errors import GossamerError


@click.command("limit")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--upload", metavar="LIMIT", help="Such as 5mbit, '5mbit; none at 22:00-06:00', or none.")
@click.option("--download", metavar="LIMIT", help="The same for received bytes.")
@click.option("--daily-cap", metavar="BYTES", help="Such as 10GB, or none.")
def limit_command(run: Path, upload: str | None, download: str | None, daily_cap: str | None) -> None:
    """Show or change the bandwidth limits of a run while it trains.

    RUN is its folder of logs on this machine. Limits are per machine, so each machine changes its own. Changes are
    effective within a second. The run must have been started with a limit, such as --upload-limit none.
    """
    from gossamer.launcher.bandwidth_keeper import read_limits, write_limits  # imported late: it imports torch

    try:
        limits = read_limits(run)
        if (upload, download, daily_cap) != (None, None, None):
            limits = limits.changed({"upload": upload, "download": download, "daily_cap": daily_cap})
            write_limits(run, limits)
    except GossamerError as error:
        raise click.ClickException(str(error)) from None
    echo(str(limits))
