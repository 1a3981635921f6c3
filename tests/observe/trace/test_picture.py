from __future__ import annotations

from pathlib import Path

import pytest
from support.virtual_traces import CLOCKS, Rounds

from gossamer.base.spans.step_range import StepRange
from gossamer.errors import GossamerError
from gossamer.observe.trace import picture
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import build


def test_a_few_steps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Rounds(count=5).record(tmp_path, CLOCKS[:2])
    assert picture.draw(build(read_run(tmp_path), StepRange(2, 3))).startswith(b"\x89PNG")


def test_too_much_for_a_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    Rounds(count=5).record(tmp_path, CLOCKS[:2])
    monkeypatch.setattr(picture, "MOST_SLICES", 10)
    with pytest.raises(GossamerError, match="--steps"):
        picture.draw(build(read_run(tmp_path)))


def test_without_matplotlib_the_line_to_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rounds(count=5).record(tmp_path, CLOCKS[:2])
    monkeypatch.setattr("gossamer.base.figures.find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r"gossamer\[plot\]"):
        picture.draw(build(read_run(tmp_path)))


def check_legend(keys: list[tuple[str, str]], shown: set[str]) -> None:
    """Each color that is shown is told, and once."""
    colors = [color for color, _ in keys]
    assert len(set(colors)) == len(colors)
    assert set(colors) == {picture.COLORS[name] for name in shown} | {picture.OPERATION}


def test_the_legend_tells_each_color_once() -> None:
    for shown in (set(picture.COLORS), {"forward", "wire: waiting for an answer"}, set[str]()):
        check_legend(picture.legend(shown), shown)
    assert (picture.COLORS["waiting"], "waiting") in picture.legend(set(picture.COLORS))


def test_a_color_that_is_told_twice_is_seen() -> None:
    every = [*((color, name) for name, color in picture.COLORS.items()), (picture.OPERATION, "under way")]
    with pytest.raises(AssertionError):
        check_legend(every, set(picture.COLORS))
