"""Directory store: gives back what was saved, bit for bit, and says what is damaged."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from support.fake_disk import watched

from gossamer.base.peer_ops import Stamp
from gossamer.errors import CheckpointError
from gossamer.federated.client.store import ClientState, DirectoryStore, PendingContribution
from gossamer.federated.messages import Report

STATE = ClientState(
    lineage="5d2c",
    round=3,
    version=5,
    replica=(torch.randn(4), torch.zeros(0)),
    residuals=({"error": torch.tensor([float("nan"), 1.0])}, {}),
    residual_version=4,
    memory={"variate": torch.randn(4, dtype=torch.float64)},
    told=2,
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "devices", 7).save(STATE)
    found = DirectoryStore(tmp_path / "devices", 7).load()
    assert (found.lineage, found.round, found.version, found.residual_version) == ("5d2c", 3, 5, 4)
    assert found.told == 2
    torch.testing.assert_close(found.replica, STATE.replica, rtol=0, atol=0)
    torch.testing.assert_close(found.residuals, STATE.residuals, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.memory, STATE.memory, rtol=0, atol=0)
    assert DirectoryStore(tmp_path / "devices", 8).load() == ClientState()


def test_what_is_on_its_way_is_loaded(tmp_path: Path) -> None:
    report = Report(samples=3, steps=2, metrics={"loss": 0.5}, counts=(1, 2), layout="abc")
    counted = replace(STATE, round=7, residuals=({"error": torch.ones(2)}, {}), residual_version=5, memory={})
    pending = PendingContribution(Stamp(0, 7, 5), report, (torch.arange(3), torch.zeros(2)), counted)
    DirectoryStore(tmp_path, 0).save(replace(STATE, pending=pending))
    found = DirectoryStore(tmp_path, 0).load()
    assert found.pending is not None
    assert (found.pending.stamp, found.pending.report) == (pending.stamp, report)
    torch.testing.assert_close(found.pending.payload, pending.payload, rtol=0, atol=0)
    kept, had = asdict(found.pending.counted), asdict(counted)
    assert kept.pop("lineage") == had.pop("lineage")
    torch.testing.assert_close(kept, had, rtol=0, atol=0)
    torch.testing.assert_close(found.memory, STATE.memory, rtol=0, atol=0)  # as before, until it counts


def test_what_was_saved_outlives_a_machine_that_loses_power(tmp_path: Path) -> None:
    """In its twin, which does not wait for the disk, the device forgets what counted, and owes it once more."""
    for durable, expected in ((True, 3), (False, -1)):
        root = tmp_path / f"{durable}"
        root.mkdir()
        with watched(root) as disk:
            DirectoryStore(root / "devices", 7, durable=durable).save(STATE)
            found = disk.after_power_failure(tmp_path / f"after {durable}", seed=None)
        assert DirectoryStore(found / "devices", 7).load().round == expected


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    DirectoryStore(tmp_path, 0).save(STATE)
    file = tmp_path / "client-0.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="damaged"):
        DirectoryStore(tmp_path, 0).load()
