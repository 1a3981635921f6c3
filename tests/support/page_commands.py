"""Page commands: the command lines that README.md and docs/ show, read by their programs' own parsers and never run."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import re
import runpy
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
from support.paths import ROOT
from torch.distributed.run import get_args_parser

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.cli.federate import FederateGroup
from gossamer.cli.join import join
from gossamer.cli.main import gossamer
from gossamer.cli.options import Machines
from gossamer.cli.run import run
from gossamer.comm.network import read_network
from gossamer.errors import GossamerError
from gossamer.plan.emulation import read_fault
from gossamer.plan.simulate import NetworkSchedule

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("gossamer", "python", "torchrun", "make", "srun", "mpirun", "pip")
INDENTED = re.compile(rf"^    ((?:[A-Z_]+=\S+ )?(?:{'|'.join(PROGRAMS)}) .*)$", re.MULTILINE)
SPAN = re.compile(rf"`((?:{'|'.join(PROGRAMS[:4])}) [^`]*)`")
SCRIPTS = ("train.py", "devices.py", "make_token.py")  # a reader's own; tutorials show them
OWN_TERMS = re.compile(r"BlockMean\(")  # which a tutorial's train.py registers
OF_FRAMEWORKS = frozenset({"TF_USE_LEGACY_KERAS"})  # TensorFlow reads it


class WrongCommand(Exception):
    """A line that its program would refuse."""


class Line(NamedTuple):
    """A command line of a page; a fragment is part of a sentence and may lack arguments."""

    text: str
    fragment: bool = False


def command_lines(page: str) -> Iterator[Line]:
    """Of fenced shell blocks and of lines indented by four; then those within sentences."""
    for language, block in FENCE.findall(page):
        if language in {"sh", "bash"}:
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    yield Line(line.strip().removeprefix("!"))
    prose = FENCE.sub("", page).replace("\\\n", " ")
    yield from map(Line, INDENTED.findall(prose))
    for span in SPAN.findall(prose):
        yield Line(" ".join(span.split()), fragment=True)


@cache
def token_file() -> str:
    """What a page calls FILE."""
    descriptor, name = tempfile.mkstemp()
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(32))
    atexit.register(os.remove, name)
    return name


def check_line(line: Line) -> None:
    """Raise WrongCommand where its program does not know an option, a recipe, a file or a target."""
    words = shlex.split(line.text, comments=True)
    while words and (variable := re.fullmatch(r"([A-Z_]+)=.*", words[0])):
        if variable[1] not in variables():
            raise WrongCommand(f"{line.text}: nothing reads {variable[1]}")
        words.pop(0)
    there = {"FILE": token_file(), "run.token": token_file(), "RUN": str(ROOT)}
    program, *arguments = [there.get(word, word) for word in without_ellipses(words)]
    if program not in READERS:
        raise WrongCommand(f"{line.text}: no reader for {program!r}; there are {', '.join(READERS)}")
    try:
        READERS[program](arguments, line.fragment)
    except (click.ClickException, GossamerError, ValueError, OSError) as error:
        raise WrongCommand(f"{line.text}: {error}") from error


@cache
def variables() -> frozenset[str]:
    """Names of environment variables that this project's sources or the frameworks read."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return OF_FRAMEWORKS.union(name for source in sources for name in re.findall(r"GOSSAMER_[A-Z_]+", source))


def without_ellipses(words: Sequence[str]) -> list[str]:
    """`...` stands for more of the same, and with an option before it for its value."""
    kept: list[str] = []
    for word in words:
        if word != "...":
            kept.append(word)
        elif kept[-1].startswith("--"):
            kept.pop()
    return kept


# -- gossamer --------------------------------------------------------------------------------------


def read_gossamer(arguments: Sequence[str], fragment: bool) -> None:
    command: click.Command = gossamer
    rest = list(arguments)
    while isinstance(command, click.Group):
        if not rest and fragment:
            return
        context = click.Context(command)
        if isinstance(command, FederateGroup):  # whose first word may be left out
            rest = command.with_command(context, rest)
        name = rest.pop(0) if rest else ""
        found = command.get_command(context, name)
        if found is None:
            raise ValueError(f"gossamer has no command {name!r}: {', '.join(command.list_commands(context))}")
        command = found
    if command is join:  # the words after its link are those of `gossamer run`
        rest, command = rest[1:], run
    if fragment:
        read_fragment(command, rest)
    else:
        given = command.make_context(command.name, rest).params
        check_values(given)
        check_script_arguments(command, given)


def read_fragment(command: click.Command, rest: Sequence[str]) -> None:
    """Only that its options exist, and the script; what follows it is its own."""
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if word.endswith(".py"):
            return read_python([word], fragment=True)
        if word.startswith("--") and word.partition("=")[0] not in known:
            raise ValueError(f"gossamer {command.name} has no {word}")


def check_script_arguments(command: click.Command, given: dict[str, Any]) -> None:
    """The script knows its arguments; one of the reader's own has no option of the command behind it."""
    program = given.get("program")
    script = program.script if program else given.get("script")
    arguments = program.arguments if program else given.get("arguments") or ()
    if script is None or (program and program.as_module):
        return
    if str(script) not in SCRIPTS:
        read_script(ROOT / script, [word.replace("{seed}", "0") for word in arguments])
        return
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if misplaced := [word for word in arguments if word.partition("=")[0] in known]:
        raise ValueError(f"{', '.join(misplaced)} comes after {script}, so the script receives it")


def check_values(given: dict[str, Any]) -> None:
    """What commands look at only once they run."""
    asked = given.get("workers") or 1
    workers = getattr(asked, "most", asked) + (given.get("servers") or 0)
    recipes = given.get("recipes") or [given.get("recipe")]
    if isinstance(recipes, dict):  # a label with its text, or a text with its recipe
        recipes = [value if isinstance(value, str) else key for key, value in recipes.items()]
    for recipe in filter(None, recipes):
        if not OWN_TERMS.search(recipe):
            resolve(recipe, workers)
    if network := given.get("network") or given.get("network_text"):
        read_network(network, workers)
    if schedule := given.get("schedule_text"):
        NetworkSchedule.read(schedule, workers)
    for fault in given.get("fault_texts") or ():
        read_fault(fault, workers)
    if "node_rank" in given:
        Machines(given["interface"], given["nodes"], given["node_rank"], given["rendezvous"])


# -- other programs --------------------------------------------------------------------------------


OPTIONAL = {"jax", "lightning"}


class Parsed(Exception):
    """A script's arguments were read, so it need not go on."""


def read_python(arguments: Sequence[str], fragment: bool) -> None:
    head, *rest = arguments
    if head == "-W":
        return read_python(rest[1:], fragment)
    if head == "-m":
        module, *rest = rest
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"there is no module {module}")
        if module == "gossamer":
            read_gossamer(rest, fragment)
    elif head not in SCRIPTS and not (ROOT / head).is_file():
        raise ValueError(f"there is no {head}")
    elif head not in SCRIPTS and (rest or not fragment):
        read_script(ROOT / head, rest)


def read_script(script: Path, arguments: Sequence[str]) -> None:
    """By the parser that the script itself makes."""
    if "parse_args(" not in script.read_text(encoding="utf-8"):
        if arguments:
            raise ValueError(f"{script.name} takes no arguments")
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *_: Any) -> None:
        parse(parser, arguments)
        raise Parsed

    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(f"{script.name}: {message}")

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.object(argparse.ArgumentParser, "error", refuse),
        mock.patch.object(sys, "path", list(sys.path)),
        suppress(Parsed),
        without_optional_libraries(),
    ):
        runpy.run_path(str(script), run_name="__main__")
        raise ValueError(f"{script.name} ran without reading its arguments")


@contextmanager
def without_optional_libraries() -> Iterator[None]:
    """A script of a library that is not installed is left unread."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise


def read_torchrun(arguments: Sequence[str], fragment: bool) -> None:
    parser = get_args_parser()
    parser.exit_on_error = False
    with mock.patch.object(parser, "error", side_effect=ValueError):
        given, strange = parser.parse_known_args(list(arguments))
    if strange:
        raise ValueError(f"torchrun has no {strange}")
    read_python([given.training_script, *given.training_script_args], fragment)


def read_make(arguments: Sequence[str], fragment: bool) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    if strange := [word for word in arguments if "=" not in word and word not in targets]:
        raise ValueError(f"the Makefile has no {', '.join(strange)}")


def read_launched(arguments: Sequence[str], fragment: bool) -> None:
    """srun and mpirun: whatever they take themselves, then a program."""
    if "python" in arguments:
        read_python(arguments[arguments.index("python") + 1 :], fragment)
    elif not fragment:
        raise ValueError("starts no program")


def read_pip(arguments: Sequence[str], fragment: bool) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if list(arguments) not in (["install", "."], *(["install", f".[{extra}]"] for extra in extras)):
        raise ValueError("this project is not on a package index: pip install .")


READERS: dict[str, Callable[[Sequence[str], bool], None]] = {
    "gossamer": read_gossamer,
    "python": read_python,
    "torchrun": read_torchrun,
    "make": read_make,
    "srun": read_launched,
    "mpirun": read_launched,
    "pip": read_pip,
}
