"""Nothing found: messages for a path without a checkpoint to load."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
NAMED = 3


def refusal(directory: str | os.PathLike[str]) -> str:
    """Why a path cannot be a folder of checkpoints, with the line to write; "" if it can."""
    path = Path(directory)
    if not path.exists() or path.is_dir():
        return ""
    message = f"{os.fspath(directory)!r} is a file, but session.load reads a folder written by session.save(FOLDER). "
    if path.suffix == ".safetensors":
        return message + f"Write model.load_state_dict(safetensors.torch.load_file({os.fspath(directory)!r}))."
    if path.suffix in TORCH_SUFFIXES or zipfile.is_zipfile(path):
        return message + (
            f"For a file of torch.save write model.load_state_dict(torch.load({os.fspath(directory)!r})) before "
            "gossamer.attach, or pass the entry in it with the model's state."
        )
    return message + "Pass the folder."


def start_notice(directory: str | os.PathLike[str]) -> str:
    """The notice for a first start, which loads nothing; "" for an empty folder."""
    where, path = os.fspath(directory), Path(directory)
    if not path.is_dir():
        return f"session.load({where!r}) loaded nothing, since this folder does not exist: training starts from scratch"
    names = sorted(each.name for each in path.iterdir())
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"session.load({where!r}) loaded nothing, since the folder has no step written by session.save, only "
        f"{', '.join(names[:NAMED])}{more}: training starts from scratch. To continue a run, pass the folder that it "
        "saved into"
    )
