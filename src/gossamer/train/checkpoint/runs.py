"""Checkpoint runs: keep a directory's steps to one run; those of another are set aside, not mixed and not deleted.

A run's name is made at its first save and goes on with whoever loads it. It stands in every manifest.

    DIRECTORY/step-00000020/                what `load` takes
    DIRECTORY/run-5f0c91ab/step-00000030/   of an earlier run, as it was; load("DIRECTORY/run-5f0c91ab") takes it
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gossamer.train.checkpoint.files import REPLACED, manifests, step_folders
from gossamer.train.checkpoint.fsync import move_folder

UNNAMED = "unnamed"  # the run of manifests that name none, as earlier versions wrote them


def agree_on_name(all_gather_text: Callable[[str], list[str]], known: str | None = None) -> str:
    """The run's name on all ranks: the one that some know, as newcomers do not, or a new one of rank 0's.

    known: as this rank knows it. Every rank asks every time, since it knows only of itself whether it must.
    """
    told = all_gather_text(known or f"new {secrets.token_hex(4)}")
    return next((name for name in told if not name.startswith("new ")), told[0].removeprefix("new "))


def run_of(manifest: dict[str, object]) -> str:
    about = manifest.get("about")
    return str(about.get("run", UNNAMED)) if isinstance(about, dict) else UNNAMED


def save_of(manifest: Mapping[str, Any]) -> str:
    """What all parts of one save have in common, and no others: its name, or the digests of all parts."""
    about = manifest.get("about")
    name = about.get("save") if isinstance(about, dict) else None
    return str(name or json.dumps(manifest["digests"]))


def set_aside(directory: str | os.PathLike[str], run: str) -> list[str]:
    """Move every step here that is another run's into a folder of that run's; returns their new places.

    Ranks that share the directory may all call it at once: a folder moves once. Raises OSError.
    """
    moved: list[str] = []
    here = Path(directory)
    for folder in (*step_folders(here).values(), *step_folders(here / REPLACED).values()):
        found = {run_of(manifest) for manifest in manifests(folder)}
        if not found or run in found:
            continue
        place = here / f"run-{min(found)}" / folder.name
        if folder.parent.name == REPLACED and place.exists():
            continue  # the step was written anew, and no save was cut short meanwhile
        with suppress(FileNotFoundError):  # another rank was faster
            move_folder(folder, place)
            moved.append(os.fspath(place))
    return moved
