"""The script or module of a command, as one would give it to python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.processes import engine_files_left_open

from gossamer.cli.main import gossamer
from gossamer.cli.program import TrainingProgram, program_argument, with_misplaced_options
from gossamer.errors import GossamerError


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--workers", type=int)
@program_argument
def run(workers: int | None, program: TrainingProgram) -> None:
    click.echo(repr((workers, str(program.script), program.arguments, program.as_module)))


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script, a package, and another script further down."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "package/__init__.py", "package/train.py", "package/__main__.py", "bare/sub/fit.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("raise RuntimeError('only the workers import it')")


def said(*words: str) -> str:
    return CliRunner().invoke(run, list(words)).output.strip()


@pytest.mark.parametrize(
    "python", [(), ("python",), ("python3",), ("python3.11",), ("python", "-u"), (sys.executable,)]
)
def test_scripts_and_modules_are_given_as_to_python(python: tuple[str, ...]) -> None:
    of_script = (None, "train.py", ("--rate", "1", "--workers", "3"), False)
    assert said(*python, "train.py", "--rate", "1", "--workers", "3") == repr(of_script)
    of_module = (2, "package.train", ("-m", "x"), True)
    assert said("--workers", "2", *python, "-m", "package.train", "-m", "x") == repr(of_module)
    assert said(*python, "-m", "package") == repr((None, "package", (), True))


def test_a_file_named_python_is_a_script() -> None:
    Path("python").write_text("")
    assert said("python", "train.py") == repr((None, "python", ("train.py",), False))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["missing/fit.py"], "Did you mean bare/sub/fit.py?"),
        (["trian.py"], "Did you mean train.py?"),
        (["package.train"], "If it is a module, write -m package.train"),
        (["zzz.py"], "Write the path of your script, such as path/to/train.py"),
        (["package"], "package is a directory. Name the script in it, such as package/train.py"),
        (["-m", "package.fit"], "there is no module package.fit: fit was not found in"),
        (["-m", "bare"], "bare is a package without __main__.py. Name a module in it: -m bare.train"),
        (["python"], "Write: python train.py"),
        (["/usr/bin/python3.9", "train.py"], "/usr/bin/python3.9 -m gossamer run"),
        (["ls", "train.py"], "ls is another program, but this command starts the workers itself. Name the Python"),
        (["--worker", "2", "train.py"], "--workers"),
        (["-m"], "the module after -m is missing. Write: -m package.train"),
        (["**.py"], "**.py does not exist in"),
        (["a" * 300], "Write the path of your script, such as path/to/train.py"),
        ([], "Missing argument 'SCRIPT [ARGUMENTS]...'"),
    ],
)
def test_a_missing_name_is_answered_with_what_to_write(words: list[str], answer: str) -> None:
    assert answer in said(*words)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workers", "3"], "--workers, which is an option of `run`"),
        (["--workers=3", "--rate", "1"], "--workers, which is an option of `run`"),
        (["--rate", "1"], None),
        (["workers"], None),
    ],
)
def test_an_error_names_options_of_the_command_that_the_script_received(
    arguments: list[str], named: str | None
) -> None:
    with click.Context(run, info_name="run"):
        text = with_misplaced_options("it failed", arguments)
    assert text.startswith("it failed")
    assert (named in text) if named else (text == "it failed")


LONG = "a" * 300  # more than the name of a file may have


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "Int8()", LONG],
        ["federate", LONG],
        ["resize", LONG, "2"],
        ["invite", LONG],
        ["simulate", "--workers=2", "--network=1mbit", "--recipe=Dense()", "--step-seconds=1", f"--shapes={LONG}"],
        ["explain", "Int8()", f"--speeds={LONG}"],
        ["explain", "Int8()", f"--json={LONG}/x.json"],
    ],
)
def test_a_text_that_is_too_long_for_a_name_is_an_error_of_the_command(words: list[str]) -> None:
    done = CliRunner().invoke(gossamer, words)
    assert done.exit_code > 0
    assert isinstance(done.exception, SystemExit | GossamerError), done.exception


RUN = ("--network", "1mbit", "--recipe", "Dense()", "--steps", "1", "--step-seconds", "0.1")
ENDS = "import argparse\nargparse.ArgumentParser().parse_args()"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["simulate", *RUN, "train.py", "--workers", "4"], "Missing option '--workers'"),
        (["compare", "--workers", "2", "train.py", "--recipe=Dense()"], "Missing option '--recipe'"),
        (["simulate", "--workers", "2", *RUN, "ends.py", "--workers", "4"], "ends.py"),
        (["explain", "Dense()", "ends.py", "--workers", "4"], "ends.py"),
        (["advise", "--network", "1mbit", "ends.py", "--workers", "4"], "ends.py"),
    ],
)
def test_errors_of_commands_name_options_that_stand_behind_the_script(words: list[str], named: str) -> None:
    Path("ends.py").write_text(ENDS)
    done = CliRunner().invoke(gossamer, words)
    said = " ".join(done.stderr.split())
    assert done.exit_code > 0
    assert named in said
    option = "--recipe" if "compare" in words else "--workers"
    assert f"The script received {option}, which is an option of `gossamer {words[0]}`." in said


def test_an_error_without_a_misplaced_option_has_no_hint() -> None:
    done = CliRunner().invoke(gossamer, ["simulate", *RUN, "train.py", "--rate", "4"])
    assert "Missing option '--workers'" in done.stderr
    assert "The script received" not in done.stderr


@pytest.mark.processes
def test_a_run_whose_script_rejects_an_option_of_the_command_reports_where_it_belongs() -> None:
    Path("parses.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    with engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", "--workers", "1", "parses.py", "--network", "100mbit,20ms"])
    assert done.exit_code == 2
    assert "Options of gossamer must come before the name of the script" in done.stderr.replace("\n", " ")


def test_nothing_of_a_package_is_imported_to_find_it() -> None:
    said("-m", "package.train")
    assert "package" not in sys.modules
    assert os.getcwd() not in sys.path


@pytest.mark.processes
def test_a_module_runs_as_under_python_and_fails_with_its_own_lines() -> None:
    Path("package/__init__.py").write_text("")
    Path("package/train.py").write_text(
        "import sys\nfrom package import helper\nprint(__name__, sys.argv[1:])\nhelper.fail()"
    )
    Path("package/helper.py").write_text("def fail():\n    raise ValueError('bad data')")
    with engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", "--workers", "1", "python", "-m", "package.train", "--rate", "1"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == "[rank 0] __main__ ['--rate', '1']"
    first, *rest = done.stderr.partition("Traceback")[2].splitlines()[1:]
    assert first.endswith('package/train.py", line 4, in <module>')
    assert "ValueError: bad data" in rest
    assert "rank 0 failed: ValueError: bad data" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "Int8()", "fails.py"],
        ["simulate", "--workers", "2", *RUN, "fails.py"],
        ["federate", "fails.py", "--recipe", "FedAvg(local_steps=1)", "--clients", "2", "--rounds", "1"],
        ["rehearse", "--shapes", "fails.py", "--step-seconds", "1"],
    ],
)
@pytest.mark.parametrize(
    ("text", "shown"), [("def load():\n    1 / 0\nload()", "ZeroDivisionError"), ("(", "SyntaxError")]
)
def test_an_error_of_a_script_has_no_frames_of_ours(words: list[str], text: str, shown: str) -> None:
    Path("fails.py").write_text(text)
    done = CliRunner().invoke(gossamer, words)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), done.exception
    assert shown in done.stderr
    assert "fails.py" in done.stderr
    assert "site-packages" not in done.stderr
    assert "gossamer/cli" not in done.stderr
