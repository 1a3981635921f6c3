"""Entry point: the command group `gossamer`, whose commands are imported when they are used.

A command is registered by its line in COMMANDS."""

from __future__ import annotations

import codecs
import errno
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from io import StringIO, TextIOWrapper
from typing import TextIO

import click
from click.shell_completion import CompletionItem

from gossamer.base import system
from gossamer.cli.console import print_text
from gossamer.cli.program import no_such_command
from gossamer.errors import GossamerError
from gossamer.launcher.fork_server import MAY_FORK, ServesForks
from gossamer.version import __version__

FILES = (
    "this process reached its limit of {soft} open files ({error}). Every worker needs some. Raise the limit and start "
    "the same command again: ulimit -n {enough}"
)
HARD = " (the hard limit of this user is {hard}: an administrator can raise it)"
SYSTEM_FILES = (
    "this machine reached the maximum number of open files of all processes ({error}). End other programs, or raise "
    "it: sysctl -w fs.file-max=1000000"
)
DISK = "no space is left on the disk ({error}). Free some space, then start the same command again"
ENOUGH_FILES = 4096


def out_of_resources(error: OSError) -> str | None:
    """A message for an error with a system limit as its cause; None for any other error."""
    match error.errno:
        case errno.EMFILE:
            soft, hard = system.open_file_limits()
            return FILES.format(soft=f"{soft:g}", error=error, enough=ENOUGH_FILES) + (
                HARD.format(hard=f"{hard:g}") if hard < ENOUGH_FILES else ""
            )
        case errno.ENFILE:
            return SYSTEM_FILES.format(error=error)
        case errno.ENOSPC | errno.EDQUOT:
            return DISK.format(error=error)
        case _:
            return None


# The five marks of a schedule stay distinct, and each substitute has the width of its character
STAND_INS = {"·": "-", "▲": "^", "═": "=", "▼": "v", "◆": "*", "µ": "u", "…": "."}
SPINNER = range(0x2800, 0x2900)  # the spinner of a progress line
BYTES_KEPT = range(0xDC80, 0xDD00)  # Python's surrogates for undecodable bytes of file names
ERRORS = "gossamer.plain"


def stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler for `codecs`: substitute of the first character that cannot be encoded, and the next position."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if ord(letter) in BYTES_KEPT:
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    if ord(letter) in SPINNER:
        return "*", error.start + 1
    return STAND_INS.get(letter, letter.encode("ascii", "backslashreplace").decode("ascii")), error.start + 1


def open_missing_streams() -> None:
    """Open the null device as standard output or errors where this process was started without it (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until this process ends


def write_plainly(*streams: TextIO) -> None:
    """Make these streams write substitutes for characters that they cannot encode, instead of raising."""
    codecs.register_error(ERRORS, stand_in)
    for stream in streams:
        if isinstance(stream, TextIOWrapper):  # streams of tests and notebooks have no encoding
            stream.reconfigure(errors=ERRORS)


@dataclass(frozen=True)
class LazyCommand:
    """Location of a command, and its help line. It is imported late: most commands import torch, for seconds."""

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
        "Recommend the recipe that reaches the loss first when SCRIPT trains on this network.",
    ),
    "bench": LazyCommand("bench", "bench", "Measure the speed of this library on this machine."),
    "checkpoint": LazyCommand(
        "checkpoint",
        "checkpoint_command",
        "Show the checkpoints in DIRECTORY: steps, workers, sizes, and whether each can be loaded.",
    ),
    "compare": LazyCommand(
        "compare",
        "compare_command",
        "Train SCRIPT with every --recipe in turn, on the same network and from the same seed.",
    ),
    "doctor": LazyCommand(
        "doctor",
        "doctor",
        "Measure round trip and bandwidth between every pair of workers, and show the machine of each.",
    ),
    "explain": LazyCommand("explain", "explain", "Show the terms, schedule, traffic and memory of RECIPE."),
    "federate": LazyCommand(
        "federate",
        "federate_command",
        "Train on devices that keep their data: `gossamer federate SCRIPT ...` simulates all of them on this machine.",
    ),
    "invite": LazyCommand("invite", "invite_command", "Print a link with which other machines join an elastic run."),
    "join": LazyCommand("join", "join", "Add workers of this machine to the elastic run of LINK."),
    "limit": LazyCommand("limit", "limit_command", "Show or change the bandwidth limits of a run while it trains."),
    "recipes": LazyCommand("recipes", "recipes", "List the terms of recipes, with an example of each."),
    "record": LazyCommand(
        "record",
        "record_command",
        "Show the record in PATH: a run's folder, a record, or an event log (FILE.events.jsonl).",
    ),
    "rehearse": LazyCommand(
        "rehearse",
        "rehearse",
        "Run recipes with a simulated model: workers sleep instead of computing, and send real bytes.",
    ),
    "resize": LazyCommand("resize", "resize_command", "Set the maximum number of workers of an elastic run."),
    "run": LazyCommand("run", "run", "Run SCRIPT on several workers."),
    "simulate": LazyCommand(
        "simulate",
        "simulate_command",
        "Train SCRIPT with all its workers in this process, with every --recipe in turn.",
    ),
    "stacks": LazyCommand(
        "stacks",
        "stacks_command",
        "Show the latest Python stacks of each rank of RUN, a folder of logs; ranks with equal stacks together.",
    ),
    "study": LazyCommand(
        "study",
        "study_command",
        "Train SCRIPT with every --recipe and every seed, with intervals over the seeds.",
    ),
    "trace": LazyCommand("trace", "trace_command", "Write a trace of all ranks of RUN, on one clock."),
    "watch": LazyCommand(
        "watch", "watch_command", "Watch RUN, a run's folder, or several runs; by default the newest in runs/."
    ),
}


class LazyGroup(click.Group):
    """A group that imports a command of COMMANDS when the command or its help is requested."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            self.add_command(COMMANDS[cmd_name].load(), cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        if name.endswith(".py"):
            raise click.UsageError(f"{name} is a script, and the command is missing. Write: gossamer run {name}", ctx)
        raise no_such_command(name, ctx, self.list_commands(ctx))

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
    """Train PyTorch models across machines with little communication."""


def main() -> None:
    open_missing_streams()
    errors = sys.stdout.errors, sys.stderr.errors
    write_plainly(sys.stdout, sys.stderr)
    try:
        run_command()
    except ServesForks as fork:
        serve = fork.serve
    serve(*errors)


def run_command() -> None:
    """Run the command of sys.argv and exit. Returns in no process; raises ServesForks in forks of it."""
    try:
        sys.exit(gossamer.main(prog_name="gossamer", standalone_mode=False, obj=MAY_FORK))
    except click.ClickException as refusal:
        output = StringIO()
        refusal.show(output)
        print_text(output.getvalue().rstrip())
        sys.exit(refusal.exit_code)
    except click.Abort:
        sys.exit("Aborted!")
    except GossamerError as error:
        print_text("\n".join([f"Error: {error}", *getattr(error, "__notes__", ())]))
        sys.exit(1)
    except OSError as error:
        if (resource_message := out_of_resources(error)) is None:
            raise
        print_text(f"Error: {resource_message}")
        sys.exit(1)
