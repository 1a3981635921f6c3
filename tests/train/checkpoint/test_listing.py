"""Listings: what a directory of checkpoints holds, and what of it can be loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.resharded_training import train
from support.virtual_workers import cluster

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.listing import newest, summaries
from gossamer.version import __version__

RECIPE = "TopK(density=0.2)"


def saved(directory: Path, steps: int, load: Path | None = None) -> None:
    cluster(lambda worker: train(worker, RECIPE, steps, load=load, save=directory), 2)


def test_all_steps_are_reported(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    saved(tmp_path, 2, load=tmp_path)
    first, second = summaries(tmp_path)
    assert (first.step, second.step, first.world, first.version) == (3, 5, 2, __version__)
    assert first.run == second.run
    assert "TopK(density=0.2)" in first.recipe
    assert first.nbytes == sum(path.stat().st_size for path in (tmp_path / "step-00000003").iterdir())
    assert first.complete
    assert newest(tmp_path) == second
    saved(tmp_path, 1)  # another run
    assert [(each.step, Path(each.directory).name) for each in summaries(tmp_path)] == [
        (1, tmp_path.name),
        (3, f"run-{first.run}"),
        (5, f"run-{first.run}"),
    ]
    assert newest(tmp_path).step == 1


def truncate(folder: Path) -> None:
    path = folder / "rank-1.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def forget(folder: Path) -> None:
    for path in folder.glob("*.json"):
        path.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no part of rank 1": lambda folder: (folder / "rank-1.json").unlink(),
    "no manifest": forget,
    "the part of rank 1 is damaged": truncate,
}


@pytest.mark.parametrize("problem", DAMAGES)
def test_what_cannot_be_loaded_is_reported(problem: str, tmp_path: Path) -> None:
    saved(tmp_path, 3)
    DAMAGES[problem](tmp_path / "step-00000003")
    (found,) = summaries(tmp_path, verify=True)
    assert found.problem.startswith(problem)
    if "damaged" in problem:
        assert summaries(tmp_path)[0].complete  # nothing was read
    else:
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            newest(tmp_path)


def test_parts_of_two_saves_are_reported(tmp_path: Path) -> None:
    saved(tmp_path / "one", 3)
    saved(tmp_path / "other", 3)
    for name in ("rank-0.json", "rank-0.safetensors"):
        shutil.copy(tmp_path / "other" / "step-00000003" / name, tmp_path / "one" / "step-00000003" / name)
    manifest = tmp_path / "one" / "step-00000003" / "rank-0.json"
    manifest.write_text(manifest.read_text().replace('"digests": [\n  "', '"digests": [\n  "0'))
    (found,) = summaries(tmp_path / "one")
    assert found.problem == "parts of several saves"
