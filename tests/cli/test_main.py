"""Entry point: an error that is told in a sentence, and what was noted beside it."""

from __future__ import annotations

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
