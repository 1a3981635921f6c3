"""Loops of docs/how-to/loops.md, loops-advanced.md and the README: each trains, in one process and on two workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import page_loops
from support.page_loops import LOOPS, WITH, WITHOUT, Loop, run_loop
from support.processes import succeed
from support.virtual_workers import notices
from torch.optim import Optimizer

LONGEST = 21  # lines of a loop


def test_the_page_has_short_loops() -> None:
    assert len(LOOPS) > 10
    assert len({loop.title for loop in LOOPS}) == len(LOOPS)
    assert {loop.title for loop in LOOPS if not 5 <= len(loop.code.splitlines()) <= LONGEST} == set()


@pytest.mark.parametrize("loop", [*LOOPS, WITHOUT, WITH], ids=lambda loop: loop.title)
def test_it_trains_alone(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with notices() as said:
        names = run_loop(loop)
    assert [line for line in said if "loaded nothing" not in line] == []
    assert any(value.state for value in names.values() if isinstance(value, Optimizer))


def test_early_stopping_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (loop,) = (loop for loop in LOOPS if loop.title == "Early stopping")
    assert run_loop(loop)["epoch"] < 20
    assert Path("model-0.pt").exists()


BLOCK = 'with gossamer.attach(model, optimizer, "Int8()") as session:'


@pytest.mark.parametrize(
    ("right", "wrong", "failure"),
    [
        ("session.epoch()", "session.epochs()", "no attribute 'epochs'"),
        ('"Int8()"', '"Int9()"', "Int9"),
        (BLOCK, "for session in [gossamer.attach(model, optimizer)]:", "leaves a session open"),
    ],
)
def test_a_loop_that_does_not_work_is_noticed(right: str, wrong: str, failure: str) -> None:
    plain = LOOPS[0]
    assert right in plain.code
    with pytest.raises((AssertionError, AttributeError, ValueError), match=failure):
        run_loop(plain._replace(code=plain.code.replace(right, wrong)))


def endings(said: str) -> dict[str, str]:
    """Digests by title. Other lines are notices of a switched recipe and of a first start without a checkpoint."""
    said = re.sub(r"^session\.load\('\w+'\) loaded nothing, .*\n", "", said, flags=re.MULTILINE)
    said = re.sub(r"^after step \d+ the recipe .* was switched to .*\n", "", said, flags=re.MULTILINE)
    lines = [re.fullmatch(r"ended (.*): (\w+)", line) for line in said.splitlines()]
    assert all(lines), said
    return dict(line.groups() for line in lines if line)


@pytest.mark.processes
def test_they_train_on_two_workers(tmp_path: Path) -> None:
    """All blocks in turn, in one job; workers end each with the same numbers."""
    first, second = (endings(said) for said in succeed([page_loops.__file__, str(tmp_path)], 2))
    assert list(first) == [loop.title for loop in (*LOOPS, WITH)]
    assert first == second
