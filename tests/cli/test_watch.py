"""`gossamer watch`: what it refuses, and what it shows in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import output_of, refusal
from support.watched_runs import KINDS, made

from gossamer.cli.run import run
from gossamer.cli.watch import watch_command
from gossamer.observe.watch import server


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "there is no run in" in refusal("watch", str(tmp_path))


def test_the_terminal_needs_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    made(tmp_path, KINDS["crashed"])
    code, text = output_of(watch_command, "--terminal", str(tmp_path))
    assert code == 0
    assert "rank 2: RuntimeError: out of memory" in text
    assert "pip install" in refusal("watch", str(tmp_path))


def test_a_run_whose_page_could_not_be_served_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    script = tmp_path / "train.py"
    script.touch()
    code, text = output_of(run, "--watch", str(script))
    assert code != 0
    assert 'pip install "gossamer[watch]"' in text


def test_control_c_ends_the_page_without_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gossamer.cli.watch._serve", interrupted)
    monkeypatch.setattr("gossamer.cli.watch.PageServer", lambda *_: None)
    monkeypatch.setattr("gossamer.cli.watch.watch_in_terminal", interrupted)
    made(tmp_path, KINDS["crashed"])
    for options in ([], ["--terminal"]):
        code, text = output_of(watch_command, *options, str(tmp_path))
        assert (code, "The runs continue" in text) == (0, True), text
