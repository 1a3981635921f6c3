"""Entry point: the command group `gossamer`, whose commands are imported when they are used.

A command is registered by its line in COMMANDS."""

from __future__ import annotations

import codecs
import errno
import resource
import sys
from dataclasses import dataclass
from importlib import import_module
from io import StringIO, TextIOWrapper
from typing import TextIO

import click
from click.shell_completion import CompletionItem

from gossamer.cli.console import say
from gossamer.errors import GossamerError
from gossamer.version import __version__

FILES = (
    "this process may open {soft} files at once, and it needs more ({error}). Every worker takes some. Allow more, and "
    "start the same command again: ulimit -n {enough}"
)
HARD = " (the hard limit of this user is {hard}: an administrator raises it)"
SYSTEM_FILES = (
    "this machine has reached the number of files that all of its processes may open ({error}). End other programs, or "
    "raise it: sysctl -w fs.file-max=1000000"
)
DISK = "no space is left on the disk ({error}). Make room there, then start the same command again"
ENOUGH_FILES = 4096


def out_of_resources(error: OSError) -> str | None:
    """A sentence on an error for which the system, and no program, is the reason; None for any other error."""
    match error.errno:
        case errno.EMFILE:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            too_low = hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES
            return FILES.format(soft=soft, error=error, enough=ENOUGH_FILES) + (
                HARD.format(hard=hard) if too_low else ""
            )
        case errno.ENFILE:
            return SYSTEM_FILES.format(error=error)
        case errno.ENOSPC | errno.EDQUOT:
            return DISK.format(error=error)
        case _:
            return None


# The marks of a schedule stay five, and every stand-in is as wide as what it stands for
STAND_INS = {"·": "-", "▲": "^", "═": "=", "▼": "v", "◆": "*", "µ": "u", "…": "."}
SPINNER = range(0x2800, 0x2900)  # what turns before a line that changes
BYTES_KEPT = range(0xDC80, 0xDD00)  # Python's surrogates for bytes of a file's name that are no text
ERRORS = "gossamer.plain"


def stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler for `codecs`: the stand-in for the first character that cannot be encoded, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if ord(letter) in BYTES_KEPT:
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    if ord(letter) in SPINNER:
        return "*", error.start + 1
    return STAND_INS.get(letter, letter.encode("ascii", "backslashreplace").decode("ascii")), error.start + 1


def write_plainly(*streams: TextIO) -> None:
    """Make these streams write stand-ins for characters that they cannot encode, instead of failing."""
    codecs.register_error(ERRORS, stand_in)
    for stream in streams:
        if isinstance(stream, TextIOWrapper):  # what a test or a notebook puts in its place has no encoding
            stream.reconfigure(errors=ERRORS)


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
