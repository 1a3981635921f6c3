"""Session files: where each rank's part of a checkpoint lies, through links, and what removing leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.lightning_training import Tiny, flat, loader, trainer
from support.virtual_workers import notices

from gossamer.errors import CheckpointError
from gossamer.integrations.lightning import GossamerStrategy, session_files

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


def fitted(folder: Path, epochs: int, path: Path | None = None, **options: Any) -> Tiny:
    torch.manual_seed(3)
    model = Tiny(dropout=0.25)
    torch.manual_seed(4)
    saves = ModelCheckpoint(folder, filename="{epoch}", **options)
    fit = trainer(folder, GossamerStrategy("Int8()"), max_epochs=epochs, enable_checkpointing=True, callbacks=[saves])
    fit.fit(model, loader(), ckpt_path=path)
    return model


def test_a_link_leads_to_the_checkpoints_own(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "epoch=1.ckpt")
    assert session_files.directory_of(tmp_path / "last.ckpt") == str(tmp_path / "epoch=1.ckpt.gossamer" / "0")
    assert session_files.directory_of("s3://bucket/a.ckpt") is None


def test_the_newest_checkpoints_keep_their_directories(tmp_path: Path) -> None:
    fitted(tmp_path, 3, monitor=None, save_top_k=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2.ckpt", "epoch=2.ckpt.gossamer"]


def test_weights_alone_have_no_directory(tmp_path: Path) -> None:
    fitted(tmp_path, 1, save_weights_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0.ckpt"]


def test_a_resumed_fit_draws_the_same_random_numbers(tmp_path: Path) -> None:
    whole = fitted(tmp_path / "whole", 3)
    fitted(tmp_path / "parts", 1)
    assert torch.equal(flat(fitted(tmp_path / "more", 3, tmp_path / "parts" / "epoch=0.ckpt")), flat(whole))
    session_files.remove(tmp_path / "parts" / "epoch=0.ckpt")
    with notices() as said:
        without = fitted(tmp_path / "without", 3, tmp_path / "parts" / "epoch=0.ckpt")
    assert any("has no directory 'epoch=0.ckpt.gossamer'" in line for line in said)
    assert not torch.equal(flat(without), flat(whole))


def test_a_state_of_another_checkpoint_with_this_name_is_refused(tmp_path: Path) -> None:
    fitted(tmp_path / "long", 2)
    fitted(tmp_path / "short", 1)
    shutil.copy(tmp_path / "long" / "epoch=1.ckpt", tmp_path / "short" / "epoch=0.ckpt")
    with pytest.raises(CheckpointError, match=r"of a checkpoint with \{'global_step': 8\}.*has \{'global_step': 16\}"):
        fitted(tmp_path / "resumed", 3, tmp_path / "short" / "epoch=0.ckpt")


def test_removing_a_link_keeps_the_parts_of_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "epoch=1.ckpt.gossamer" / "0").mkdir(parents=True)
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "epoch=1.ckpt")
    session_files.remove(tmp_path / "last.ckpt")
    assert (tmp_path / "epoch=1.ckpt.gossamer").is_dir()
    session_files.remove(tmp_path / "epoch=1.ckpt")
    assert not (tmp_path / "epoch=1.ckpt.gossamer").exists()
