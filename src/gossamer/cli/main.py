"""Entry point: the command group `gossamer`, whose commands are imported when they are used."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from io import StringIO

import click
from click.shell_completion import CompletionItem

from gossamer.cli.console import say
from gossamer.cli.resource_errors import out_of_resources
from gossamer.cli.terminal_encoding import write_plainly
from gossamer.errors import GossamerError
from gossamer.version import __version__


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is defined, and its line in the help of the group: most commands import torch, for seconds."""

    module: str  # in gossamer.cli
    name: str
    help: str

    def load(self) -> click.Command:
        command: click.Command = getattr(import_module(f"gossamer.cli.{self.module}"), self.name)
        return command


COMMANDS = {
    "advise": LazyCommand(
        "advise",
        "advise_command",
        "Say which recipe SCRIPT should train with on this network: which reaches the loss first.",
    ),
    "bench": LazyCommand("bench", "bench", "Measure what this library does on this machine."),
    "checkpoint": LazyCommand(
        "checkpoint",
        "checkpoint_command",
        "Show the checkpoints in DIRECTORY: steps, workers, sizes, and which of them can be loaded.",
    ),
    "compare": LazyCommand(
        "compare",
        "compare_command",
        "Train SCRIPT with every --recipe in turn, on the same network and from the same seed.",
    ),
    "doctor": LazyCommand(
        "doctor",
        "doctor",
        "Measure round trip and bandwidth between every pair of workers, and show what each runs on.",
    ),
    "explain": LazyCommand(
        "explain", "explain", "Show what RECIPE means, when it talks, what it sends, and what it remembers."
    ),
    "federate": LazyCommand(
        "federate",
        "federate_command",
        "Train on devices that keep their data: `gossamer federate SCRIPT ...` simulates them all on this machine.",
    ),
    "recipes": LazyCommand("recipes", "recipes", "List what a recipe can be made of, a copyable line each."),
    "record": LazyCommand(
        "record",
        "record_command",
        "Show the record in PATH: a run's folder, a record, or the event log (FILE.events.jsonl) beside one.",
    ),
    "rehearse": LazyCommand(
        "rehearse",
        "rehearse",
        "Run recipes on a model that is not here: workers sleep where they would compute, and send real bytes.",
    ),
    "resize": LazyCommand("resize", "resize_command", "Let an elastic run have at most N workers from now on."),
    "run": LazyCommand("run", "run", "Run SCRIPT on several workers."),
    "simulate": LazyCommand(
        "simulate", "simulate_command", "Train SCRIPT with all its workers in this process, by every --recipe in turn."
    ),
    "stacks": LazyCommand(
        "stacks",
        "stacks_command",
        "Show where each rank of RUN, a folder of logs, was in Python when last it was asked; equal stacks together.",
    ),
    "trace": LazyCommand("trace", "trace_command", "Write what all ranks of RUN did, on one clock."),
    "watch": LazyCommand(
        "watch", "watch_command", "Watch RUN, a run's folder, or several side by side; by default the newest in runs/."
    ),
}


class LazyGroup(click.Group):
    """A group that imports a command of COMMANDS when it is called, or asked for its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            self.add_command(COMMANDS[cmd_name].load(), cmd_name)
        return self.commands.get(cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete) and name in COMMANDS]
        commands = [CompletionItem(name, help=COMMANDS[name].help) for name in names]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in sorted(COMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def gossamer() -> None:
    """Train PyTorch models across machines that talk less."""


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
