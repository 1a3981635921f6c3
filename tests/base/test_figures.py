from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.base import figures
from gossamer.errors import GossamerError


def test_a_figure_is_as_large_as_asked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = figures.figure(2.0, 1.0, dpi=100)
    axes = shown.subplots()
    figures.title(axes, "loss")
    figures.open_frame(axes)
    figures.light_grid(axes, "x")
    shown.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[16:24] == (200).to_bytes(4, "big") + (100).to_bytes(4, "big")
    assert axes.get_title(loc="left") == "loss"
    assert [name for name, side in axes.spines.items() if side.get_visible()] == ["left", "bottom"]
    assert axes.get_axisbelow() is True


def test_without_matplotlib_the_error_names_the_extra_and_what_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r'pip install "gossamer\[plot\]"'):
        figures.figure(1.0, 1.0)
    with pytest.raises(GossamerError, match="the table needs nothing"):
        figures.check_matplotlib("; the table needs nothing")
