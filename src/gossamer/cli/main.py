"""Entry point: the command group `gossamer`."""

from __future__ import annotations

import sys

import click

from gossamer.cli.bench import bench
from gossamer.cli.compare import compare_command
from gossamer.cli.doctor import doctor
from gossamer.cli.explain import explain
from gossamer.cli.recipes import recipes
from gossamer.cli.rehearse import rehearse
from gossamer.cli.run import run
from gossamer.cli.terminal_encoding import write_plainly
from gossamer.errors import GossamerError
from gossamer.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def gossamer() -> None:
    """Train PyTorch models across machines that talk less."""


for command in (run, compare_command, explain, rehearse, doctor, recipes, bench):
    gossamer.add_command(command)


def main() -> None:
    write_plainly(sys.stdout, sys.stderr)
    try:
        gossamer(prog_name="gossamer")
    except GossamerError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
