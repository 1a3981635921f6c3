"""`gossamer resize`: how it finds a run, and what it says where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command_line import refusal

from gossamer.cli.resize import find_run
from gossamer.launcher.coordinator import RUN_CARD, RunCard


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    Path("token").write_bytes(os.urandom(32))
    Path("token").chmod(0o600)


def test_a_run_is_found_by_its_folder_or_by_its_address() -> None:
    card = RunCard(("127.0.0.1", 29600), Path("token"))
    card.write(Path("logs"))
    assert find_run("logs", None) == card
    assert find_run("logs", Path("other")) == RunCard(("127.0.0.1", 29600), Path("other"))
    assert find_run("127.0.0.1:29600", Path("token")) == card


def test_of_a_run_that_was_killed_the_token_is_gone() -> None:
    RunCard(("127.0.0.1", 29600), Path("nothing")).write(Path("logs"))
    assert "was killed" in refusal("resize", "logs", "4")


def test_a_card_is_written_again() -> None:
    for port in (1, 2):
        RunCard(("::1", port), Path("token")).write(Path("logs"))
    assert find_run("logs", None).address == ("::1", 2)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("logs", "4"), "no elastic run with these logs is in progress"),
        (("nowhere", "4"), "neither the folder of a run's logs"),
        (("127.0.0.1:29600", "4"), "add --token-file FILE"),
        (("127.0.0.1:29600", "0"), "0 is not in the range 1<=x<=65536"),
        (("127.0.0.1:29600", "4", "--token-file", "none"), "create one for a new run"),
        (("10.0.0.1:x", "4"), "Write HOST:PORT"),
    ],
)
def test_a_worker_that_cannot_be_found_is_told_how(arguments: tuple[str, ...], hint: str) -> None:
    assert hint in " ".join(refusal("resize", *arguments).split())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"coordinator": 3, "token_file": "t"}', '{"coordinator": "a:1"}'])
def test_a_card_that_cannot_be_read_names_the_line_to_write(text: str) -> None:
    Path("logs", RUN_CARD).write_text(text)
    assert "gossamer resize HOST:PORT N --token-file FILE" in " ".join(refusal("resize", "logs", "4").split())
