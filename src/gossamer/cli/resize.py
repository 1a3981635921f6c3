"""`gossamer resize`: changes the maximum number of workers of a running elastic run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from gossamer.cli.console import echo
from gossamer.cli.options import check_certificates, option_group, read_address
from gossamer.comm.elastic.remote_control import resize
from gossamer.comm.environment.run_token import check_token_file, read_token
from gossamer.comm.tls_contexts import Tls, run_tls, tls_contexts
from gossamer.errors import ConnectError
from gossamer.launcher.coordinator import RunCard, read_run_card
from gossamer.launcher.job import MOST_WORKERS

SECONDS = 5.0  # for the coordinator to answer
NEITHER = (
    "{run} is neither the folder of a run's logs, such as runs/2026-01-31_12-00-00, nor HOST:PORT of its coordinator"
)


def find_run(run: str, token_file: Path | None) -> RunCard:
    """Address of a run's coordinator, and its token file. Raises ConnectError, BadParameter and UsageError."""
    if os.path.isdir(run):  # Path.is_dir raises for a text that is too long for a name
        card = read_run_card(Path(run))
        if token_file is None and not card.token_file.exists():
            raise ConnectError(f"The run with the logs {run} was killed, and its token file was removed.")
        return RunCard(card.address, token_file or card.token_file)
    if ":" not in run:
        raise click.BadParameter(NEITHER.format(run=run), param_hint="RUN")
    address = read_address(run)
    if token_file is None:
        raise click.UsageError("The coordinator needs the run's token: add --token-file FILE.")
    return RunCard(address, token_file)


@dataclass(frozen=True)
class RunAccess:
    """Address of a run's coordinator, the SHA-256 of its token file, and its TLS contexts."""

    address: tuple[str, int]
    token: bytes
    tls: Tls | None


def _access(run: str, token_file: Path | None, tls_folder: Path | None) -> RunAccess:
    """Raises as `find_run`."""
    card = find_run(run, token_file)
    tls = run_tls() if tls_folder is None else tls_contexts(tls_folder)
    return RunAccess(card.address, read_token(check_token_file(card.token_file)), tls)


run_access = option_group(
    "access",
    _access,
    click.argument("run"),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        help="The run's secret.  [default: the file named in RUN's folder]",
    ),
    click.option(
        "--tls", "tls_folder", type=click.Path(path_type=Path), callback=check_certificates, help="The run's."
    ),
)


@click.command("resize")
@run_access
@click.argument("workers", type=click.IntRange(1, MOST_WORKERS), metavar="N")
def resize_command(access: RunAccess, workers: int) -> None:
    """Set the maximum number of workers of an elastic run.

    RUN is its folder of logs, or HOST:PORT of its coordinator. If the run has fewer workers, its first launcher starts
    the missing ones. If it has more, the newest workers leave, and their processes end with exit code 0.
    """
    answer = resize(access.address, access.token, workers, seconds=SECONDS, tls=access.tls)
    if answer.startswith(("refused", "the run is over")):
        raise click.ClickException(answer)
    echo(answer)
