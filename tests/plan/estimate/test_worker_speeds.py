"""Speeds of workers, from a text and from the store of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.plan.estimate.worker_speeds import SpeedError, read_speeds, speeds_of_run

SPEEDS = 1.0, 1.0, 1.0, 0.2


@pytest.mark.parametrize("text", ["1,1,1,0.2", "1x3,0.2", " 1 x3 , 2e-1 ", "1.0x2, 1, .2"])
def test_speeds_are_read(text: str) -> None:
    assert read_speeds(text, 4) == SPEEDS


@pytest.mark.parametrize(
    "text", ["", "1,1,1", "1x4,0.2", "1,1,1,0", "1,1,1,-1", "1,1,1,inf", "1,1,1,nan", "1x0,1", "a"]
)
def test_other_speeds_are_rejected(text: str) -> None:
    with pytest.raises(SpeedError, match="speed"):
        read_speeds(text, 4)


def store(folder: Path, work: list[float], shares: dict[int, float] | None = None) -> Path:
    """Ranks that wait for the last of them, from step 0 on; shares are logged after step 40."""
    db, step = open_store(folder / "run.sqlite"), max(work)
    with db:
        for rank, seconds in enumerate(work):
            rows = [
                {"rank": rank, "step": n, "at": n, "steps": 2, "seconds": 2 * step, "waiting": 2 * (step - seconds)}
                for n in range(2, 80, 2)
            ]
            insert(db, "step", rows)
        for rank, share in (shares or {}).items():
            insert(db, "metric", [{"name": "share", "step": 0, "at": 0, "rank": rank, "value": share}])
    db.close()
    return folder


def test_speeds_of_a_run_do_not_count_waiting(tmp_path: Path) -> None:
    assert speeds_of_run(store(tmp_path, [0.1, 0.2, 0.1, 0.5])) == (1.0, 0.5, 1.0, 0.2)
    assert read_speeds(str(tmp_path), 4) == (1.0, 0.5, 1.0, 0.2)
    with pytest.raises(SpeedError, match=r"of 4 workers, and there are 2\. Name 2 speeds, or write --workers 4"):
        read_speeds(str(tmp_path), 2)


def test_work_by_speed_is_divided_by_the_share(tmp_path: Path) -> None:
    folder = store(tmp_path, [0.4, 0.4, 0.4], {0: 0.5, 1: 0.3, 2: 0.2})
    assert speeds_of_run(folder) == (1.0, 0.6, 0.4)


def test_a_run_of_the_watch_page_has_speeds(tmp_path: Path) -> None:
    fill(tmp_path, SyntheticRun(ranks=4, straggler=1))
    assert speeds_of_run(tmp_path) == (1.0, 0.625, 1.0, 1.0)  # 0.5 of a step, and 0.8 of the slow rank


def test_a_folder_without_measurements_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SpeedError, match=r"has no run\.sqlite"):
        speeds_of_run(tmp_path)
    open_store(tmp_path / "run.sqlite").close()
    with pytest.raises(SpeedError, match="Run more steps"):
        speeds_of_run(tmp_path)


def test_speeds_of_many_workers_are_longer_than_a_file_name() -> None:
    assert read_speeds(",".join(["1"] * 299 + ["0.2"]), 300)[-2:] == (1.0, 0.2)
