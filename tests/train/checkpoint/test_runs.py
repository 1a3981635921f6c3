"""Runs: a directory's steps belong to one run, and those of another are kept aside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.resharded_training import train
from support.virtual_workers import Worker, cluster, network, notices

from gossamer.errors import CheckpointError
from gossamer.train import checkpoint
from gossamer.train.checkpoint import runs

RECIPE = "TopK(density=0.2)"


def saved(directory: Path, steps: int, load: Path | None = None, world: int = 2) -> None:
    cluster(lambda worker: train(worker, RECIPE, steps, load=load, save=directory), world)


def loaded_step(directory: Path, world: int = 2) -> int:
    begun = cluster(lambda worker: train(worker, RECIPE, 0, load=directory)[0], world)
    (step,) = {steps for *_, steps, _ in begun}
    return int(step)


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.glob("**/step-*"))


def test_a_new_run_in_an_old_directory_loads_its_own_step(tmp_path: Path) -> None:
    saved(tmp_path, 8)
    with notices() as said:
        saved(tmp_path, 3)
    assert loaded_step(tmp_path) == 3
    (aside,) = tmp_path.glob("run-*")
    assert names(tmp_path) == [f"{aside.name}/step-00000008", "step-00000003"]
    (line,) = said
    assert "another run" in line
    assert str(aside) in line
    assert loaded_step(aside) == 8  # nothing is lost


def test_a_step_of_the_same_number_is_kept_too(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    before = [path.read_bytes() for path in sorted(tmp_path.glob("step-00000003/*"))]
    saved(tmp_path, 3)
    (aside,) = tmp_path.glob("run-*")
    assert [path.read_bytes() for path in sorted(aside.glob("step-00000003/*"))] == before


def test_whoever_loads_continues_with_the_run(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    with notices() as said:
        saved(tmp_path, 2, load=tmp_path)
    assert (said, names(tmp_path)) == ([], ["step-00000003", "step-00000005"])
    assert len({json.loads(path.read_text())["about"]["run"] for path in tmp_path.glob("**/*.json")}) == 1


def test_a_session_that_saves_twice_is_one_run(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        session = worker.attach(model, optimizer, RECIPE)
        for _ in range(2):
            session.save(tmp_path)
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()

    cluster(work, 2)
    assert names(tmp_path) == ["step-00000000", "step-00000001"]


def test_another_number_of_workers_continues_with_the_run(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    saved(tmp_path, 2, load=tmp_path, world=3)
    assert names(tmp_path) == ["step-00000003", "step-00000005"]


def unname(directory: Path) -> None:
    """Manifests as versions without names of runs wrote them."""
    for path in directory.glob("**/*.json"):
        manifest = json.loads(path.read_text())
        del manifest["about"]["run"]
        path.write_text(json.dumps(manifest))


def test_checkpoints_without_a_name_are_gone_on_from_or_set_aside(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    unname(tmp_path)
    saved(tmp_path, 2, load=tmp_path)
    assert names(tmp_path) == ["step-00000003", "step-00000005"]
    saved(tmp_path, 1)
    assert names(tmp_path) == [
        f"run-{runs.UNNAMED}/step-00000003",
        f"run-{runs.UNNAMED}/step-00000005",
        "step-00000001",
    ]


def test_what_cannot_be_set_aside_stops_the_save_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 8)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.raises(CheckpointError, match=r"another run's: rank 0.*No space left"):
            saved(tmp_path, 3)
    assert checkpoint.complete_steps(tmp_path, 0) == [8]
    assert loaded_step(tmp_path) == 8


def test_a_folder_moves_once_where_ranks_share_it(tmp_path: Path) -> None:
    saved(tmp_path, 8)
    moved = [runs.set_aside(tmp_path, "mine") for _ in range(2)]
    assert [len(places) for places in moved] == [1, 0]


def test_a_step_that_its_run_has_aside_already_is_kept_next_to_it(tmp_path: Path) -> None:
    saved(tmp_path, 8)
    saved(tmp_path, 3)
    (aside,) = tmp_path.glob("run-*")
    saved(tmp_path, 0, load=aside)  # the same run and step
    (other,) = {*tmp_path.glob("run-*")} - {aside}
    saved(tmp_path, 2)
    assert names(tmp_path) == sorted(
        [
            f"{aside.name}/step-00000008",
            f"{aside.name}-2/step-00000008",
            f"{other.name}/step-00000003",
            "step-00000002",
        ]
    )
    assert loaded_step(tmp_path / f"{aside.name}-2") == 8
