"""Nothing found: explains what a path holds that has no checkpoint to load."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
NAMED = 3


def refusal(directory: str | os.PathLike[str]) -> str:
    """Why a path cannot be the folder of checkpoints, and the line to write; "" where it can."""
    path = Path(directory)
    if not path.exists() or path.is_dir():
        return ""
    told = f"{os.fspath(directory)!r} is a file, and session.load reads the folder that session.save(FOLDER) wrote. "
    if path.suffix == ".safetensors":
        return told + f"Write model.load_state_dict(safetensors.torch.load_file({os.fspath(directory)!r}))."
    if path.suffix in TORCH_SUFFIXES or zipfile.is_zipfile(path):
        return told + (
            f"For a file of torch.save write model.load_state_dict(torch.load({os.fspath(directory)!r})) before "
            "gossamer.attach, or of the entry in it that holds the model's state."
        )
    return told + "Give the folder."


def start_notice(directory: str | os.PathLike[str]) -> str:
    """What to say of a first start, in which nothing is loaded; "" for an empty folder, which was made for it."""
    where, path = os.fspath(directory), Path(directory)
    if not path.is_dir():
        return f"session.load({where!r}) loaded nothing, since there is no such folder yet: training starts anew"
    names = sorted(each.name for each in path.iterdir())
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"session.load({where!r}) loaded nothing, since no step that session.save wrote is in the folder, only "
        f"{', '.join(names[:NAMED])}{more}: training starts anew. If it should continue, give the folder that the run "
        "before saved into"
    )
