"""A checkpoint is complete when every rank says so."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from gossamer import checkpoint
from gossamer.errors import CheckpointError

Tell = Callable[[str], list[str]]


class Stateful(Protocol):
    """What can be part of a checkpoint; the world, for one."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def save(
    directory: str | os.PathLike[str],
    step: int,
    rank: int,
    tree: Mapping[str, Any],
    about: Mapping[str, str],
    tell: Tell,
) -> None:
    """Write this rank's part, and declare the step complete once all ranks have written theirs.

    tell: says a text to all ranks and returns everyone's, by rank. Where one rank fails, all
    raise CheckpointError.
    """
    try:
        digests = _together(tell, step, lambda: checkpoint.stage(directory, step, rank, tree))
        _together(tell, step, partial(_complete, directory, step, rank, digests, about))
    except CheckpointError:
        checkpoint.abandon(directory, step, rank)
        raise


def _complete(
    directory: str | os.PathLike[str], step: int, rank: int, digests: list[str], about: Mapping[str, str]
) -> str:
    checkpoint.complete(directory, step, rank, digests, dict(about))
    return "complete"


def _together(tell: Tell, step: int, act: Callable[[], str], wish: str = "could be written") -> list[str]:
    """Do something on every rank; returns what it gave, by rank, or raises on all of them where one failed."""
    try:
        told = "done " + act()
    except (CheckpointError, OSError, RuntimeError) as failure:
        told = f"lost {failure}"
    answers = tell(told)
    lost = [f"rank {who}: {text[5:]}" for who, text in enumerate(answers) if text.startswith("lost ")]
    if lost:
        raise CheckpointError(
            f"the checkpoint of step {step} was given up, since not every rank's part {wish}: {'; '.join(lost)}. "
            "Others in the same directory are as they were."
        )
    return [text[5:] for text in answers]


def load(directory: str | os.PathLike[str], rank: int, tell: Tell) -> Any | None:
    """This rank's part of the newest checkpoint that is complete on every rank; None where there is none at all."""
    steps = [set(json.loads(text)) for text in tell(json.dumps(checkpoint.complete_steps(directory, rank)))]
    if any(steps) and not all(steps):
        without = ", ".join(str(who) for who, theirs in enumerate(steps) if not theirs)
        raise CheckpointError(
            f"of {len(steps)} ranks, {without} have no checkpoint in {os.fspath(directory)!r} and the others do: it "
            "was written by another number of workers, or the directory is not shared by all machines. Run as many "
            "workers as wrote it."
        )
    for step in sorted(set.intersection(*steps), reverse=True):
        found: list[Any] = []
        manifests = _together(tell, step, partial(_read, directory, step, rank, found), "could be read")
        if len(set(manifests)) == 1:  # else a crash left parts of two saves of one step
            return found[0]
    return None


def _read(directory: str | os.PathLike[str], step: int, rank: int, found: list[Any]) -> str:
    tree, manifest = checkpoint.read(directory, step, rank)
    found.append(tree)
    return json.dumps(manifest["digests"])


def random_state() -> dict[str, Any]:
    """Where torch's and Python's global generators stand."""
    kind, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
        "python": [kind, list(numbers), gauss],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put them back there."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))
