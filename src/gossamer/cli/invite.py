"""`gossamer invite`: makes and revokes the links with which other machines join an elastic run."""

from __future__ import annotations

from pathlib import Path

import click

from gossamer.cli.console import echo
from gossamer.cli.options import check_parent, lifetime_option, uses_option
from gossamer.cli.program import refuse_given
from gossamer.cli.resize import SECONDS, RunAccess, run_access
from gossamer.comm.elastic.remote_control import invite, revoke
from gossamer.comm.environment.run_token import write_secret


@click.command("invite")
@run_access
@lifetime_option
@uses_option
@click.option("--revoke", "number", type=click.IntRange(1), help="Make the invitation with this number invalid.")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=check_parent,
    help="Write the link to a file with mode 0600 instead of printing it.",
)
def invite_command(
    access: RunAccess,
    lifetime: float | None,
    uses: int | None,
    number: int | None,
    file: Path | None,
) -> None:
    """Print a link with which other machines join an elastic run.

    They write: gossamer join LINK SCRIPT. RUN is the run's folder of logs, or HOST:PORT of its coordinator. A link is
    as secret as a password. --revoke stops its further use; machines that have joined keep the token of the run.
    """
    address, token, tls = access.address, access.token, access.tls
    if number is not None:
        refuse_given(
            click.get_current_context(),
            ("lifetime", "uses", "file"),
            "{option} is of a new link; --revoke ends one. Omit it.",
        )
        revoke(address, token, number, seconds=SECONDS, tls=tls)
        echo(f"invitation {number} is revoked; machines that have joined by it stay in the run")
        return
    made = invite(address, token, lifetime_seconds=lifetime, uses=uses, seconds=SECONDS, tls=tls)
    if file is None:
        echo(made.link())
        return
    write_secret(file, made.link())
    echo(f"the link of invitation {made.number} is in {file}: gossamer join @{file} SCRIPT")
