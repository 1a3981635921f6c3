from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from gossamer.base import figures
from gossamer.base.figures import check_matplotlib
from gossamer.errors import GossamerError
from gossamer.observe.plot import drawn, plot


def record(loss: list[list[float | None]]) -> dict[str, Any]:
    return {
        "recipe": "EveryStep() + Dense() + Complete()",
        "workers": 2,
        "steps": 200,
        "compute_seconds_per_step": 0.02,
        "waiting_seconds_per_step": 0.005,
        "communication_seconds_per_step": {"encode": 0.001, "wire": 0.01, "decode": 0.001},
        "bytes_sent_per_step": {"accounted": 40_000.0, "interface": None},
        "metrics": {"loss": loss} if loss else {},
    }


LOSS: list[list[float | None]] = [[step, step / 50, 1 / step] for step in range(1, 201)]
HUGE: list[list[float | None]] = [[step, step / 50, 1.7e308 * (-1) ** step] for step in range(1, 201)]


@pytest.mark.parametrize("losses", [[LOSS], [LOSS, LOSS], [[]], [[[1, 0.1, 2.0], [2, 0.2, None]]], [HUGE]])
def test_a_picture_of_whatever_there_is(tmp_path: Path, losses: list[list[list[float | None]]]) -> None:
    path = tmp_path / "picture.png"
    plot([record(loss) for loss in losses], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_recipes_are_named_at_their_curves_ends_and_nothing_covers_another() -> None:
    names = ["Dense()", "TopK(density=0.01)", "Int8()", "home"]
    figure = drawn([record(LOSS) | {"recipe": name} for name in names])
    figure.draw_without_rendering()
    above, below = figure.subfigs
    for axes in above.axes:
        named = [text for text in axes.texts if text.get_text() in names]
        assert sorted(text.get_text() for text in named) == sorted(names)
        boxes = [Text.get_window_extent(text) for text in named]  # without the line to its curve
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2)), "they end at the same place"
        assert axes.get_legend() is None
    (bars,) = below.axes
    assert [tick.get_text() for tick in bars.get_yticklabels()] == names
    assert len({patch.get_hatch() for patch in bars.patches}) == 5
    said = [text.get_text() for text in bars.texts]
    assert "computing 20 ms" in said
    assert "waiting 5 ms" in said


def test_without_matplotlib_the_error_explains_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r'pip install "gossamer\[plot\]"'):
        check_matplotlib()
