"""Entry point: an error that is told in a sentence, and what was noted beside it."""

from __future__ import annotations

import errno
import resource
import sys

import click
import pytest

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
