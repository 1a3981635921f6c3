"""Checkpoint runs: a directory holds the steps of one run; those of another run are moved aside, not deleted.

The name of a run is made at its first save, adopted by runs that load it, and stored in every manifest.

    DIRECTORY/step-00000020/                loaded by `load`
    DIRECTORY/run-5f0c91ab/step-00000030/   of an earlier run, unchanged; load("DIRECTORY/run-5f0c91ab") loads it
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gossamer.train.checkpoint.files import REPLACED, manifests, step_folders
from gossamer.train.checkpoint.fsync import move_folder

UNNAMED = "unnamed"  # the run of manifests without a name, written by earlier versions


def agree_on_name(all_gather_text: Callable[[str], list[str]], known: str | None = None) -> str:
    """The run's name on all ranks: the one that some rank knows, or a new one of rank 0. Collective.

    Args:
        known: the name on this rank; None on workers that joined later. All ranks call it each time, since a rank
            cannot know whether others need it.
    """
    run_ids = all_gather_text(known or f"new {secrets.token_hex(4)}")
    return next((name for name in run_ids if not name.startswith("new ")), run_ids[0].removeprefix("new "))


def run_of(manifest: dict[str, object]) -> str:
    about = manifest.get("about")
    return str(about.get("run", UNNAMED)) if isinstance(about, dict) else UNNAMED


def save_of(manifest: Mapping[str, Any]) -> str:
    """The identity of a save: its name, or the digests of all parts."""
    about = manifest.get("about")
    name = about.get("save") if isinstance(about, dict) else None
    return str(name or json.dumps(manifest["digests"]))


def set_aside(directory: str | os.PathLike[str], run: str) -> list[str]:
    """Move all steps of other runs into a folder per run. Returns their new places.

    Ranks that share the directory may call it at the same time. Raises OSError.
    """
    moved: list[str] = []
    here = Path(directory)
    for folder in (*step_folders(here).values(), *step_folders(here / REPLACED).values()):
        found = {run_of(manifest) for manifest in manifests(folder)}
        if not found or run in found:
            continue
        place = here / f"run-{min(found)}" / folder.name
        if folder.parent.name == REPLACED and place.exists():
            continue  # the step was written again, and no save was interrupted in the meantime
        with suppress(FileNotFoundError):  # moved by another rank
            moved.append(os.fspath(_moved(folder, place.parent)))
    return moved


def _moved(folder: Path, to: Path, number: int = 1) -> Path:
    """Move a step into the folder `to`, or `to`-2 and so on if its run has a step of this number there already."""
    place = to.with_name(f"{to.name}-{number}" if number > 1 else to.name) / folder.name
    try:
        move_folder(folder, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return _moved(folder, to, number + 1)
    return place
