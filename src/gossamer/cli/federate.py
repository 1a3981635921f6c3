"""`gossamer federate`: federations, simulated or served."""

from __future__ import annotations

import click

from gossamer.cli.federate_server import join_command, serve_command


@click.group("federate")
def federate_command() -> None:
    """Train on devices that keep their data."""


federate_command.add_command(serve_command)
federate_command.add_command(join_command)
