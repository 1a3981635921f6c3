"""Model file: the line that it says reads the model, and a write that fails leaves what was there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.deployed_federations import flat
from support.federations import model_of

from gossamer.federated import model_state
from gossamer.federated.model_state import save_model


def test_the_line_that_it_says_reads_the_model(tmp_path: Path) -> None:
    saved, model = model_of(seed=1), model_of(seed=2)
    assert not torch.equal(flat(model), flat(saved))
    exec(save_model(saved, tmp_path / "it's.pt"), {"torch": torch, "model": model})
    assert torch.equal(flat(model), flat(saved))


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    save_model(model_of(), path)
    before = path.read_bytes()

    def full(state: object, file: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(model_state.torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        save_model(model_of(seed=1), path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]
