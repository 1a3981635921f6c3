"""`gossamer checkpoint`: lists, verifies and exports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from support.resharded_training import train
from support.virtual_workers import cluster, network, parameters

from gossamer.cli.checkpoint import checkpoint_command
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint import dcp


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    cluster(lambda worker: train(worker, "TopK(density=0.2)", 3, save=folder), 2)
    return folder


def shown(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint_command, [str(each) for each in arguments])


def test_steps_are_listed(kept: Path) -> None:
    result = shown(kept)
    assert result.exit_code == 0
    header, line = result.output.splitlines()
    assert header.split() == ["step", "workers", "size", "run", "recipe", "state"]
    assert line.split()[:2] == ["3", "2"]
    assert "TopK(density=0.2)" in line
    assert line.rstrip().endswith("complete")


def test_damage_is_found_where_it_is_looked_for(kept: Path) -> None:
    path = kept / "step-00000003" / "rank-1.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "not complete" not in shown(kept).output
    assert "not complete: the part of rank 1 is damaged" in " ".join(shown(kept, "--verify").output.split())


def test_the_newest_is_exported(kept: Path, tmp_path: Path) -> None:
    result = shown(kept, "--export-dcp", tmp_path / "out")
    assert result.exit_code == 0
    assert "step 3 is in" in result.output
    model = network(9)
    dcp.import_(tmp_path / "out", model)
    assert not torch.equal(parameters(model), parameters(network(9)))


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    assert isinstance(shown(tmp_path).exception, CheckpointError)
