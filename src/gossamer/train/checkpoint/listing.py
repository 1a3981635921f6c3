"""Checkpoint listing: the checkpoints in a directory, and whether all their parts exist."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.base.units import ranks_text
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.files import (
    MALFORMED,
    REPLACED,
    complete_steps,
    folder_bytes,
    manifests,
    read,
    step_folders,
)
from gossamer.train.checkpoint.runs import run_of, save_of


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """One step in a directory of checkpoints, according to its manifests."""

    directory: str  # where session.load finds it
    step: int
    world: int  # number of workers that wrote it; 0 without a readable manifest
    recipe: str
    run: str
    version: str  # of Gossamer
    nbytes: int
    problem: str = ""  # why it cannot be loaded; "" if it can

    @property
    def complete(self) -> bool:
        return not self.problem


def summaries(directory: str | os.PathLike[str], *, verify: bool = False) -> list[CheckpointSummary]:
    """All steps in a directory, by step; then those that were moved aside or are being replaced.

    Args:
        verify: also read every part, and compare its digest. Otherwise a damaged part counts as present.
    """
    here = Path(directory)
    aside = sorted(path for path in here.glob("run-*") if path.is_dir())
    return [
        _summary(place, step, folder, verify)
        for place in (here, here / REPLACED, *aside)
        for step, folder in step_folders(place).items()
    ]


def newest(directory: str | os.PathLike[str]) -> CheckpointSummary:
    """The newest complete step of a directory. Raises CheckpointError without one."""
    found = [each for each in summaries(directory) if each.complete and Path(each.directory) == Path(directory)]
    if not found:
        raise CheckpointError(
            f"{os.fspath(directory)} has no complete checkpoint. List its contents: gossamer "
            f"checkpoint {os.fspath(directory)}"
        )
    return found[-1]


def _summary(place: Path, step: int, folder: Path, verify: bool) -> CheckpointSummary:
    found_manifests = manifests(folder)
    manifest: dict[str, Any] = found_manifests[0] if found_manifests else {"world": 0}
    about = manifest.get("about")
    about = about if isinstance(about, dict) else {}
    return CheckpointSummary(
        directory=os.fspath(place),
        step=step,
        world=manifest["world"],
        recipe=str(about.get("recipe", "")),
        run=run_of(manifest),
        version=str(about.get("gossamer", "")),
        nbytes=folder_bytes(folder),
        problem=_problem(place, step, found_manifests, verify),
    )


def _problem(place: Path, step: int, found_manifests: list[dict[str, Any]], verify: bool) -> str:
    if not found_manifests:
        return "no manifest"
    world = found_manifests[0]["world"]
    missing = [rank for rank in range(world) if step not in complete_steps(place, rank)]
    if missing:
        return f"no part of {ranks_text(missing)}"
    saves = {save_of(manifest) for manifest in found_manifests if manifest.get("rank") in range(world)}
    if len(saves) > 1:
        return "parts of several saves"
    for rank in range(world) if verify else ():
        try:
            read(place, step, rank)
        except (CheckpointError, OSError, *MALFORMED) as error:
            return f"the part of rank {rank} is damaged: {error}"
    return ""
