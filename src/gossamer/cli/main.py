"""Entry point: the command group `gossamer`."""

from __future__ import annotations

import sys
from io import StringIO

import click

from gossamer.cli.advise import advise_command
from gossamer.cli.bench import bench
from gossamer.cli.checkpoint import checkpoint_command
from gossamer.cli.compare import compare_command
from gossamer.cli.console import say
from gossamer.cli.doctor import doctor
from gossamer.cli.explain import explain
from gossamer.cli.federate import federate_command
from gossamer.cli.recipes import recipes
from gossamer.cli.record import record_command
from gossamer.cli.rehearse import rehearse
from gossamer.cli.resize import resize_command
from gossamer.cli.resource_errors import out_of_resources
from gossamer.cli.run import run
from gossamer.cli.simulate import simulate_command
from gossamer.cli.stacks import stacks_command
from gossamer.cli.terminal_encoding import write_plainly
from gossamer.cli.trace import trace_command
from gossamer.cli.watch import watch_command
from gossamer.errors import GossamerError
from gossamer.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def gossamer() -> None:
    """Train PyTorch models across machines that talk less."""


for command in (
    run,
    watch_command,
    resize_command,
    compare_command,
    advise_command,
    record_command,
    stacks_command,
    trace_command,
    checkpoint_command,
    explain,
    federate_command,
    rehearse,
    simulate_command,
    doctor,
    recipes,
    bench,
):
    gossamer.add_command(command)


def main() -> None:
    write_plainly(sys.stdout, sys.stderr)
    try:
        sys.exit(gossamer.main(prog_name="gossamer", standalone_mode=False))
    except click.ClickException as refusal:
        said = StringIO()
        refusal.show(said)
        say(said.getvalue().rstrip())
        sys.exit(refusal.exit_code)
    except click.Abort:
        sys.exit("Aborted!")
    except GossamerError as error:
        say("\n".join([f"Error: {error}", *getattr(error, "__notes__", ())]))
        sys.exit(1)
    except OSError as error:
        if (told := out_of_resources(error)) is None:
            raise
        say(f"Error: {told}")
        sys.exit(1)
