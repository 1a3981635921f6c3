"""Entry point: commands that are imported when they are used, and errors that are told in a sentence."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from gossamer.cli import main
from gossamer.errors import LoopError


def test_notes_of_an_error_stand_under_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def fails() -> None:
        error = LoopError("the model that it was given is as it was")
        error.add_note("It was client 3 in round 7.")
        raise error

    monkeypatch.setattr(sys, "argv", ["gossamer", "fails"])
    monkeypatch.setitem(main.gossamer.commands, "fails", fails)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "Error: the model that it was given is as it was",
        "It was client 3 in round 7.",
    ]


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """`gossamer fails`, which raises the error."""

    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["gossamer", "fails"])
    monkeypatch.setitem(main.gossamer.commands, "fails", fails)
    main.main()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMFILE, "this process may open 24 files at once"),
        (errno.ENFILE, "this machine has reached the number of files"),
        (errno.ENOSPC, "no space is left on the disk"),
        (errno.EDQUOT, "no space is left on the disk"),
    ],
)
def test_a_lack_of_files_or_space_is_a_sentence(
    number: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (24, 24))
    with pytest.raises(SystemExit) as ended:
        fail(monkeypatch, OSError(number, "as the system says", "runs/x/boot-0-0.txt"))
    assert ended.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"Error: {told}" in said
    assert "as the system says: 'runs/x/boot-0-0.txt'" in said
    assert ("ulimit -n 4096 (the hard limit of this user is 24" in said) == (number == errno.EMFILE)


def test_another_error_of_the_system_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError):
        fail(monkeypatch, PermissionError(errno.EACCES, "denied"))


HELP_WITHOUT_TORCH = """
import sys
from click.testing import CliRunner
from gossamer.cli.main import gossamer
for words in (["--version"], ["--help"], ["run", "--help"]):
    done = CliRunner().invoke(gossamer, words)
    assert done.exit_code == 0, done.output
    assert "torch" not in sys.modules, words
"""


def test_help_and_version_do_not_import_torch() -> None:
    subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], check=True)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    """Update COMMANDS in gossamer/cli/main.py."""
    command = main.COMMANDS[name].load()
    assert (command.name, command.get_short_help_str(limit=500)) == (name, main.COMMANDS[name].help)


def test_commands_are_listed_and_an_unknown_one_is_refused() -> None:
    shown = CliRunner().invoke(main.gossamer, ["--help"]).output
    assert all(f"\n  {name} " in shown for name in main.COMMANDS)
    refused = CliRunner().invoke(main.gossamer, ["rnu"])
    assert refused.exit_code == 2
    assert "No such command 'rnu'" in refused.output


def test_the_shell_completes_commands_options_and_files() -> None:
    complete = BashComplete(main.gossamer, {}, "gossamer", "_GOSSAMER_COMPLETE")
    assert [item.value for item in complete.get_completions([], "re")] == ["recipes", "record", "rehearse", "resize"]
    assert [item.value for item in complete.get_completions(["run"], "--dry")] == ["--dry-run"]
    assert [item.type for item in complete.get_completions(["run"], "tra")] == ["file"]
