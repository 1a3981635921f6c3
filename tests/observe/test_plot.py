from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import GossamerError
from gossamer.observe import plot as plots
from gossamer.observe.plot import check_matplotlib, plot


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


@pytest.mark.parametrize("losses", [[LOSS], [LOSS, LOSS], [[]], [[[1, 0.1, 2.0], [2, 0.2, None]]]])
def test_a_picture_of_whatever_there_is(tmp_path: Path, losses: list[list[list[float | None]]]) -> None:
    path = tmp_path / "picture.png"
    plot([record(loss) for loss in losses], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r'pip install "gossamer\[plot\]"'):
        check_matplotlib()
