"""Nothing found: session.load of a file is refused, and a start that loads nothing is said once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network, notices

from gossamer.errors import CheckpointError


def loaded(path: Path, world: int = 2) -> tuple[list[dict[str, Any]], list[str]]:
    def work(worker: Worker) -> dict[str, Any]:
        _, _, session = worker.start(network(worker.rank), sgd)
        return session.load(path)

    with notices() as said:
        found = cluster(work, world)
    return found, [text for text in said if "session.load" in text]


@pytest.mark.parametrize("world", [1, 2])
def test_load_refuses_a_file_and_names_the_line_to_write(tmp_path: Path, world: int) -> None:
    lines = {
        "old.pt": "torch.load",
        "archive": "torch.load",
        "model.safetensors": "safetensors.torch.load_file",
        "notes.txt": "Pass the folder",
    }
    for name, line in lines.items():
        path = tmp_path / name
        if name in ("old.pt", "archive"):
            torch.save({"model": {}}, path)
        else:
            path.write_text("text")
        with pytest.raises(CheckpointError, match=r"is a file, but session\.load reads a folder") as refusal:
            loaded(path, world)
        assert line in str(refusal.value)


def test_a_first_start_loads_nothing_and_says_so_once(tmp_path: Path) -> None:
    found, said = loaded(tmp_path / "typo" / "dir")
    assert found == [{}, {}]
    assert [text.partition("since ")[2] for text in said] == [
        "this folder does not exist: training starts from scratch"
    ]
    assert loaded(tmp_path) == ([{}, {}], []), "an empty folder was made for this run"


def test_a_folder_without_a_checkpoint_is_named_with_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.txt", "b", "c", "d"):
        (tmp_path / name).touch()
    found, said = loaded(tmp_path)
    assert found == [{}, {}]
    assert len(said) == 1
    assert "only a.txt, b, c and 1 more" in said[0]
