"""Program argument: a script or module with its arguments, as for the python command."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gossamer.errors import GossamerError

PYTHON = re.compile(r"python(3(\.\d+)?)?")
TRACEBACK = "GOSSAMER_TRACEBACK"  # "full" prints all frames
UNBUFFERED = "-u"  # workers always run with it
TAKES_A_SCRIPT = (
    "{name} is another program, but this command starts the workers itself. Name the Python script: gossamer {rest}"
)


@dataclass(frozen=True)
class TrainingProgram:
    """The program of every worker. script: a file, or with `as_module` the dotted name of a module."""

    script: Path
    arguments: tuple[str, ...] = ()
    as_module: bool = False


def program_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument SCRIPT with all words after it, passed to the command as `program`."""
    return click.argument(
        "program",
        nargs=-1,
        required=True,
        type=click.UNPROCESSED,
        callback=_read,
        metavar="SCRIPT [ARGUMENTS]...",
        shell_complete=lambda context, argument, incomplete: [CompletionItem(incomplete, type="file")],
    )(command)


def _read(context: click.Context, argument: click.Parameter, words: tuple[str, ...]) -> TrainingProgram:
    """Read `train.py --rate 1` or `-m package.train`, optionally after `python`. Refuse missing files and modules."""
    left = list(words)
    if _is_python(left[0]):
        left = left[2:] if left[1:2] == [UNBUFFERED] else left[1:]
    match left:
        case ["-m", name, *arguments]:
            return TrainingProgram(_checked_module(name), tuple(arguments), as_module=True)
        case ["-m"]:
            raise click.UsageError("the module after -m is missing. Write: -m package.train", context)
        case [name, *arguments] if not name.startswith("-"):
            return TrainingProgram(_checked_script(name, arguments, context), tuple(arguments))
        case [option, *_]:
            raise _no_such_option(option, context)
    raise click.UsageError(f"the script after {words[0]} is missing. Write: {words[0]} train.py", context)


def no_such_command(name: str, context: click.Context, commands: Sequence[str]) -> click.UsageError:
    """The error for an unknown command, which suggests a similar one of `commands`."""
    near = get_close_matches(name, commands, 1)
    return click.UsageError(f"No such command {name!r}." + (f" Did you mean {near[0]}?" if near else ""), context)


def refuse_given(context: click.Context, names: Container[str], sentence: str) -> None:
    """Raise UsageError if an option of these parameters is on the command line. sentence: with `{option}`."""
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(sentence.format(option=option.opts[0]))


class ScriptPath(click.Path):
    """Type of the argument SCRIPT: an existing file. The error suggests the likely correct name."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fspath(value))
        if not os.path.exists(path):
            self.fail(f"{path} does not exist in {os.getcwd()}. {_line_to_write(path)}", param, ctx)
        return super().convert(value, param, ctx)


class RunsScript(click.Command):
    """A command that runs the user's script in this process. An error of the script is shown from its first line on,
    without the frames of this library."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (GossamerError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            script = ctx.params.get("script", ctx.params.get("where"))
            if script is None or (text := _error_in(script, error)) is None:
                raise
            raise click.ClickException(f"{script} failed:\n{text}") from error


class ScriptCommand(RunsScript):
    """A command with the arguments SCRIPT and ARGUMENTS, and errors that name misplaced options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:  # most likely because of misplaced options
            found = self.make_parser(ctx).parse_args(given)[0].get("arguments")
            behind = found if isinstance(found, tuple | list) else ()  # click uses a sentinel for a missing value
            raise click.UsageError(with_misplaced_options(error.format_message(), behind, ctx), ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GossamerError as error:
            message = "\n".join([str(error), *getattr(error, "__notes__", ())])
            raise click.ClickException(with_misplaced_options(message, ctx.params["arguments"], ctx)) from error
        except click.ClickException as error:
            hinted = with_misplaced_options(error.message, ctx.params["arguments"], ctx)
            setattr(error, "message", hinted)  # noqa: B010 (final in its type)
            raise


def with_misplaced_options(message: str, arguments: Sequence[str], context: click.Context | None = None) -> str:
    """Add a hint to an error if the script received options of a gossamer command.

    Args:
        message: The error of a script that failed.
        arguments: The arguments that the script was started with.
        context: Of the command; None: the current one.

    Returns:
        The message; with a second line if an argument is an option of this `gossamer` command.
    """
    context = context or click.get_current_context(silent=True)
    if context is None:
        return message
    known = {name for parameter in context.command.params for name in parameter.opts if name.startswith("--")}
    given = dict.fromkeys(word.partition("=")[0] for word in arguments)
    if misplaced := [name for name in given if name in known]:
        options, are = ", ".join(misplaced), "are options" if len(misplaced) > 1 else "is an option"
        return (
            f"{message}\nThe script received {options}, which {are} of `{context.command_path}`. Options of gossamer "
            "must come before the name of the script."
        )
    return message


def _error_in(script: str | Path, error: Exception) -> str | None:
    """The traceback of an error from the script on; None if the script is not in it."""
    names = {str(script), os.path.realpath(script)}
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename not in names:
        at = at.tb_next
    unread = isinstance(error, SyntaxError) and error.filename in names
    if os.environ.get(TRACEBACK) == "full" or (at is None and not unread):
        return None
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()


def _is_python(word: str) -> bool:
    """Whether a command begins with this interpreter, or with a name of it."""
    if not PYTHON.fullmatch(Path(word).name):
        return False
    if os.sep not in word:
        return not os.path.isfile(word)
    if os.path.realpath(word) != os.path.realpath(sys.executable):
        raise click.BadParameter(
            f"{word} is not the Python of the workers, {sys.executable}. Leave it out, or install gossamer there and "
            f"write: {word} -m gossamer run"
        )
    return True


def _checked_module(name: str) -> Path:
    """Find a module without importing it: imports may take seconds, and belong to the workers."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places) if places is not None else None
        if spec is None:
            raise click.BadParameter(
                f"there is no module {name}: {part} was not found in {os.getcwd()} or the installed packages. Start "
                "in the folder that contains the package, or name a file: gossamer run train.py"
            )
        places = spec.submodule_search_locations
    if places is not None and PathFinder.find_spec("__main__", places) is None:
        raise click.BadParameter(f"{name} is a package without __main__.py. Name a module in it: -m {name}.train")
    return Path(name)


def _checked_script(name: str, arguments: Sequence[str], context: click.Context) -> Path:
    script = Path(name)
    if os.path.isfile(script):  # Path.is_file raises for a name that is too long
        return script
    rest = shlex.join([context.info_name or "run", *arguments])
    if os.path.isdir(script):
        raise click.BadParameter(f"{name} is a directory. Name the script in it, such as {script / 'train.py'}")
    if os.sep not in name and script.suffix != ".py" and shutil.which(name):
        raise click.BadParameter(TAKES_A_SCRIPT.format(name=name, rest=rest))
    raise click.BadParameter(f"{name} does not exist in {os.getcwd()}. {_line_to_write(script)}")


def _line_to_write(missing: Path) -> str:
    """A sentence with the likely correct name."""
    name = glob.escape(missing.name)
    if elsewhere := sorted([*glob.glob(f"*/{name}"), *glob.glob(f"*/*/{name}")]):
        return f"Did you mean {elsewhere[0]}?"
    if alike := get_close_matches(missing.name, [path.name for path in missing.parent.glob("*.py")], 1):
        return f"Did you mean {missing.parent / alike[0]}?"
    if missing.suffix != ".py" and "." in missing.name:
        return f"If it is a module, write -m {missing}"
    return "Write the path of your script, such as path/to/train.py"


def _no_such_option(option: str, context: click.Context) -> click.NoSuchOption:
    """Error with suggestions, for a command that passes unknown options to the script."""
    known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")]
    return click.NoSuchOption(option, possibilities=get_close_matches(option, known, 3), ctx=context)
