"""Coordinated checkpoints: all ranks save or load together, and a step is complete on every rank or on none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gossamer import checkpoint
from gossamer.checkpoint import reshard
from gossamer.checkpoint.state import AGREED_KEY, Stateful, random_state, set_random_state
from gossamer.errors import CheckpointError

AllGatherText = Callable[[str], list[str]]


def save(
    directory: str | os.PathLike[str],
    step: int,
    rank: int,
    tree: Mapping[str, Any],
    about: Mapping[str, str],
    all_gather_text: AllGatherText,
) -> None:
    """Write this rank's part, and declare the step complete once all ranks have written theirs.

    all_gather_text: returns every rank's text, by rank. Where one rank fails, all raise CheckpointError.
    """
    try:
        digests = _on_all_ranks(all_gather_text, step, lambda: checkpoint.stage(directory, step, rank, tree))
        _on_all_ranks(all_gather_text, step, partial(_complete, directory, step, rank, digests, about))
    except CheckpointError:
        checkpoint.abandon(directory, step, rank)
        raise


def _complete(
    directory: str | os.PathLike[str], step: int, rank: int, digests: list[str], about: Mapping[str, str]
) -> str:
    checkpoint.complete(directory, step, rank, digests, dict(about))
    return "complete"


def _on_all_ranks(
    all_gather_text: AllGatherText, step: int, act: Callable[[], str], failing: str = "could be written"
) -> list[str]:
    """Act on every rank; returns the results by rank, or raises on all ranks where one failed."""
    try:
        told = "done " + act()
    except (CheckpointError, OSError, RuntimeError) as failure:
        told = f"lost {failure}"
    answers = all_gather_text(told)
    lost = [f"rank {who}: {text[5:]}" for who, text in enumerate(answers) if text.startswith("lost ")]
    if lost:
        raise CheckpointError(
            f"the checkpoint of step {step} was given up, since not every rank's part {failing}: {'; '.join(lost)}. "
            "Others in the same directory are as they were."
        )
    return [text[5:] for text in answers]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint as this rank loads it."""

    tree: Mapping[str, Any]  # this rank's, or one for it where another number of workers wrote theirs
    sessions: Sequence[Mapping[str, Any]]  # the tree's "session", of all writers by rank where they were others
    news: str | None = None  # what resharding did, in one line


def load(
    directory: str | os.PathLike[str], rank: int, world: int, all_gather_text: AllGatherText
) -> LoadedCheckpoint | None:
    """The newest checkpoint that every rank can go on from; None where there is none at all.

    Each needs its own part, and all parts where another number of workers wrote them.
    """
    usable, others = _usable(directory, rank, world)
    answers = [json.loads(text) for text in all_gather_text(json.dumps([usable, others]))]
    steps = [{(step, writers) for step, writers in usable} for usable, _ in answers]
    if any(steps) and not all(steps):
        without = ", ".join(str(who) for who, theirs in enumerate(steps) if not theirs)
        raise CheckpointError(
            f"of {world} ranks, {without} have no checkpoint in {os.fspath(directory)!r} that they can go on from and "
            "the others do: parts are missing, or the directory is not shared by all machines. Share it, or copy all "
            "parts to every machine."
        )
    strange = sorted({writers for _, others in answers for writers in others})
    if strange and not any(steps):
        raise CheckpointError(
            f"what is in {os.fspath(directory)!r} was written by another number of workers, {strange[0]} and not "
            f"{world}, and not all of their parts are there, so what they still had to send would be lost. Copy all "
            f"parts into it on every machine, run {strange[0]} workers, or begin in an empty directory."
        )
    for step, writers in sorted(set.intersection(*steps), reverse=True):
        found: list[LoadedCheckpoint] = []
        digests = _on_all_ranks(
            all_gather_text, step, partial(_read, directory, step, rank, world, writers, found), "could be read"
        )
        if len(set(digests)) == 1 and digests[0]:  # else a crash left parts of two saves of one step
            return found[0]
    return None


def _usable(directory: str | os.PathLike[str], rank: int, world: int) -> tuple[list[tuple[int, int]], list[int]]:
    """([(step, its number of writers)] that this rank could go on from, other numbers of writers in here)."""
    complete = {each: set(checkpoint.complete_steps(directory, each)) for each in (0, rank)}
    usable: list[tuple[int, int]] = []
    others: list[int] = []
    for step in sorted(complete[0] | complete[rank]):
        writers = checkpoint.writers(directory, step, 0) or checkpoint.writers(directory, step, rank) or world
        needed = [rank] if writers == world else list(range(writers))
        if all(step in checkpoint.complete_steps(directory, each) for each in needed):
            usable.append((step, writers))
        if writers != world:
            others.append(writers)
    return usable, others


def _read(
    directory: str | os.PathLike[str], step: int, rank: int, world: int, writers: int, found: list[LoadedCheckpoint]
) -> str:
    """Append a checkpoint to `found`; returns the digests of all parts, or "" where the parts read differ in them."""
    if writers == world:
        tree, manifest = checkpoint.read(directory, step, rank)
        found.append(LoadedCheckpoint(tree, [tree["session"]]))
        return json.dumps(manifest["digests"])
    kept: dict[str, Any] = {}
    parts: list[Any] = []
    digests: set[str] = set()
    for each in range(writers):
        tree, manifest = checkpoint.read(directory, step, each)
        digests.add(json.dumps(manifest["digests"]))
        parts.append({part: tree[part] for part in ("session", "world")})  # one model in memory is enough
        if each == rank % writers:
            kept = tree
    kept["world"] = reshard.fold_positions([part["world"] for part in parts], rank, world)
    if rank >= writers:  # two workers must not draw the same
        kept["random"] = random_state()
    sessions = [part["session"] for part in parts]
    apart = any(AGREED_KEY in memory for session in sessions for memory in session["state"].values())
    recipe = sessions[0]["recipe"]
    news = reshard.describe(os.fspath(directory), step, writers, world, recipe=recipe, apart=apart)
    found.append(LoadedCheckpoint(kept, sessions, news))
    return digests.pop() if len(digests) == 1 else ""


def states(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of each part, and of the global random generators."""
    return {**{name: part.state_dict() for name, part in parts.items()}, "random": random_state()}


def put_back(parts: Mapping[str, Stateful], tree: Mapping[str, Any]) -> None:
    """Restore the parts that the tree has; the generators first, since the world's shards draw."""
    set_random_state(tree["random"])
    for name, part in parts.items():
        if tree.get(name):
            part.load_state_dict(tree[name])
