"""Checkpoint runs: a directory's steps belong to one run; those of another are set aside, not mixed and not deleted.

A run's name is made at its first save and goes on with whoever loads it. It stands in every manifest.

    DIRECTORY/step-00000020/                what `load` takes
    DIRECTORY/run-5f0c91ab/step-00000030/   of an earlier run, as it was; load("DIRECTORY/run-5f0c91ab") takes it
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gossamer.checkpoint.files import manifests, step_folders

UNNAMED = "unnamed"  # the run of manifests that name none, as earlier versions wrote them


def agree_on_name(all_gather_text: Callable[[str], list[str]]) -> str:
    """A new run's name: rank 0's, on all ranks."""
    return all_gather_text(secrets.token_hex(4))[0]


def run_of(manifest: dict[str, object]) -> str:
    about = manifest.get("about")
    return str(about.get("run", UNNAMED)) if isinstance(about, dict) else UNNAMED


def set_aside(directory: str | os.PathLike[str], run: str) -> list[str]:
    """Move every step here that is another run's into a folder of that run's; returns their new places.

    Ranks that share the directory may all call it at once: a folder moves once. Raises OSError.
    """
    moved: list[str] = []
    for folder in step_folders(Path(directory)).values():
        found = {run_of(manifest) for manifest in manifests(folder)}
        if not found or run in found:
            continue
        place = folder.parent / f"run-{min(found)}" / folder.name
        place.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another rank was faster
            folder.rename(place)
            moved.append(os.fspath(place))
    return moved
