"""Coordinated checkpoints: save and load on all ranks together; a step is complete on every rank or on no rank."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.train import checkpoint
from gossamer.train.checkpoint import reshard, runs
from gossamer.train.checkpoint.agreement import AllGatherText, SharedStep, on_all_ranks
from gossamer.train.checkpoint.background import BackgroundSave
from gossamer.train.checkpoint.files import MALFORMED, nbytes_of
from gossamer.train.checkpoint.snapshot import Flat, SnapshotBuffers
from gossamer.train.checkpoint.state import AGREED_KEY, Stateful, random_state, refuse_other_tree, set_random_state

Copies = Callable[[Any, Sequence[int]], dict[int, list[bytes]]]  # (tree, sizes by rank) -> files of other ranks
PLACES = (checkpoint.REPLACED, "")  # subfolders of a directory that may contain a step, the preferred one last


def save(
    at: SharedStep, tree: Mapping[str, Any], about: Mapping[str, str], keep: int = 2, copies: Copies | None = None
) -> None:
    """Write this rank's part, and declare the step complete once all ranks have written theirs. Collective.

    Args:
        at: the step.
        tree: this rank's part.
        about: includes the name of the "run"; steps of another run are moved aside first.
        keep: number of checkpoints to keep, including this one.
        copies: exchanges parts that other ranks keep as well.

    Raises:
        CheckpointError: on all ranks, if one rank failed.
    """
    held: dict[int, list[bytes]] = {}
    try:
        _set_aside(at, about["run"])
        held = _exchanged(at, tree, copies)
        digests = at.on_all_ranks(partial(_stage, at, tree, held))
        at.on_all_ranks(partial(_complete, at, (at.rank, *held), digests, about))
    except CheckpointError:
        for each in (at.rank, *held):
            checkpoint.abandon(at.directory, at.step, each)
        raise
    for each in (at.rank, *held):
        checkpoint.prune(at.directory, at.step, each, len(digests), keep)  # after all ranks have the new one


def _exchanged(at: SharedStep, tree: Any, copies: Copies | None) -> dict[int, list[bytes]]:
    """Files of other ranks that this rank keeps as well."""
    if copies is None:
        return {}
    sizes = at.on_all_ranks(lambda: str(nbytes_of(tree)))
    return copies(tree, [int(size) for size in sizes])


def begin_in_background(
    at: SharedStep,
    tree: Mapping[str, Any],
    about: Mapping[str, str],
    keep: int,
    copies: Copies | None,
    buffers: SnapshotBuffers,
) -> BackgroundSave:
    """As `save`, but return after copying this rank's tree into `buffers`. Pass the result to `conclude`."""
    taken: list[Flat] = []

    def copy() -> str:
        taken.append(buffers.copy(tree))
        return ""

    def keep_replaced() -> str:
        for each in parts:
            checkpoint.keep_replaced(at.directory, at.step, each)
        return ""

    _set_aside(at, about["run"])
    world = len(at.on_all_ranks(copy))
    parts: dict[int, Any] = {at.rank: taken[0], **_exchanged(at, taken[0], copies)}
    at.on_all_ranks(keep_replaced)
    named = {**about, "save": runs.agree_on_name(at.all_gather_text)}
    return BackgroundSave(at.directory, at.step, at.rank, world, keep, parts, named)


def conclude(pending: BackgroundSave | None, all_gather_text: AllGatherText) -> bool:
    """Wait on all ranks until a background save is written, and remove older checkpoints. Every rank must call it.

    Returns:
        Whether it is complete; False if no save is pending, or if a writer has left in the meantime.

    Raises:
        CheckpointError: on all ranks, if one rank failed; that rank's error has the cause.
    """
    status = "nothing"
    if pending is not None:
        pending.wait()
        status = f"lost {pending.step} {pending.error}" if pending.error else "complete"
    answers = all_gather_text(status)
    lost = [f"rank {who}: {text.split(' ', 2)[2]}" for who, text in enumerate(answers) if text.startswith("lost ")]
    if lost:
        step = next(text.split(" ")[1] for text in answers if text.startswith("lost "))
        raise CheckpointError(
            f"the checkpoint of step {step}, written during training, was abandoned, since not every rank's part "
            f"could be written: {'; '.join(lost)} The previous one is kept, and nothing else was written: call "
            "session.save() again to save the current step."
        ) from (pending.error if pending is not None else None)
    if pending is None or answers.count("complete") < pending.world:
        return False
    pending.prune()
    return True


def _set_aside(at: SharedStep, run: str) -> None:
    def act() -> str:
        return "\n".join(runs.set_aside(at.directory, run))

    answers = at.on_all_ranks(act, "could be distinguished from another run's")
    moved = sorted({place for text in answers for place in text.splitlines()})
    if moved and at.rank == 0:
        notice(
            f"{at.directory} held checkpoints of another run, which session.load() would have mixed with those "
            f"of this run. They are kept in {', '.join(moved)}. To continue from them, call "
            f"session.load({os.path.dirname(moved[-1])!r}) before the first save"
        )


def _stage(at: SharedStep, tree: Mapping[str, Any], held: Mapping[int, list[bytes]]) -> str:
    for each in (at.rank, *held):
        checkpoint.keep_replaced(at.directory, at.step, each)
    for each, pieces in held.items():
        checkpoint.stage_pieces(at.directory, at.step, each, pieces)
    return checkpoint.stage(at.directory, at.step, at.rank, tree)


def _complete(at: SharedStep, ranks: Sequence[int], digests: list[str], about: Mapping[str, str]) -> str:
    for rank in ranks:
        checkpoint.complete(at.directory, at.step, rank, digests, dict(about), keep=None)
    return "complete"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint as loaded by this rank."""

    tree: Mapping[str, Any]  # of this rank; one derived for it if another number of workers saved the checkpoint
    sessions: Sequence[Mapping[str, Any]]  # the tree's "session"; of all writers by rank if their number differs
    run: str  # the name of the run that wrote it
    news: str | None = None  # how it was resharded, in one line


def load(
    directory: str | os.PathLike[str], rank: int, world: int, all_gather_text: AllGatherText
) -> LoadedCheckpoint | None:
    """The newest checkpoint that every rank can load, or None if there is no checkpoint (rank 0 prints a notice).

    Each rank needs its own part; all parts if another number of workers wrote them.

    Raises:
        CheckpointError: on all ranks, if the path is a file or no checkpoint can be used.
    """
    usable, others = _usable(directory, rank, world)
    status = json.dumps([usable, others, refusal(directory)])
    answers = [json.loads(text) for text in all_gather_text(status)]
    if refusals := [why for _, _, why in answers if why]:
        raise CheckpointError(refusals[0])
    steps = [{tuple(each) for each in usable} for usable, _, _ in answers]
    if any(steps) and not all(steps):
        without = ", ".join(str(who) for who, remote in enumerate(steps) if not remote)
        raise CheckpointError(
            f"of {world} ranks, {without} have no checkpoint in {os.fspath(directory)!r} that they can load, but the "
            "others do: parts are missing, or the directory is not shared by all machines. Share it, or copy all parts "
            "to every machine."
        )
    strange = sorted({writers for _, others, _ in answers for writers in others})
    if strange and not any(steps):
        raise CheckpointError(
            f"the checkpoints in {os.fspath(directory)!r} were written by {strange[0]} workers, not {world}, and some "
            "of their parts are missing, so unsent residuals would be lost. Copy all parts into the directory on every "
            f"machine, run {strange[0]} workers, or begin in an empty directory."
        )
    passed_over: list[str] = []
    for step, place, writers in sorted(set.intersection(*steps), reverse=True):
        found: list[LoadedCheckpoint] = []
        read = partial(_read, os.path.join(directory, PLACES[place]), step, rank, world, writers, found)
        damages = on_all_ranks(all_gather_text, step, partial(_damage, read), "could be read")
        why = "; ".join(
            f"rank {who}: {text.removeprefix('damaged ')}"
            for who, text in enumerate(damages)
            if text.startswith("damaged ")
        )
        if not why and len(set(damages)) == 1 and damages[0]:
            if passed_over and rank == 0:
                notice(f"session.load() continues from step {step}: {'; '.join(passed_over)}")
            return found[0]
        passed_over.append(
            f"step {step} is damaged ({why})"
            if why
            else f"step {step} has parts of two saves, since one of them was interrupted"
        )
    if passed_over:
        raise CheckpointError(
            f"no checkpoint in {os.fspath(directory)!r} can be used: {'; '.join(passed_over)}. Copy an intact one into "
            "it, or begin in an empty directory."
        )
    if rank == 0 and (description := start_notice(directory)):
        notice(description)
    return None


def _damage(read: Callable[[], str]) -> str:
    """The result of `read`, or "damaged " and the reason; disk and network errors are not caught."""
    try:
        return read()
    except CheckpointError as error:
        return f"damaged {error}"
    except MALFORMED as error:
        return f"damaged {type(error).__name__}: {error}"


def _usable(directory: str | os.PathLike[str], rank: int, world: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """([(step, index in PLACES, number of writers)] of usable steps, all other numbers of writers found).

    A replaced step counts if its replacement is not usable.
    """
    usable: list[tuple[int, int, int]] = []
    others: list[int] = []
    for place, name in enumerate(PLACES):
        here = os.path.join(directory, name)
        complete = {each: set(checkpoint.complete_steps(here, each)) for each in (0, rank)}
        for step in sorted(complete[0] | complete[rank]):
            writers = checkpoint.writers(here, step) or world
            needed = [rank] if writers == world else list(range(writers))
            if all(step in checkpoint.complete_steps(here, each) for each in needed):
                usable.append((step, place, writers))
            if writers != world:
                others.append(writers)
    return usable, others


def _read(
    directory: str | os.PathLike[str], step: int, rank: int, world: int, writers: int, found: list[LoadedCheckpoint]
) -> str:
    """Append a checkpoint to `found`. Returns the name of its save, or "" if its parts are of several saves."""
    if writers == world:
        tree, manifest = _read_part(directory, step, rank)
        found.append(LoadedCheckpoint(tree, [tree["session"]], runs.run_of(manifest)))
        return runs.save_of(manifest)
    kept: dict[str, Any] = {}
    parts: list[Any] = []
    saves: set[str] = set()
    for each in range(writers):
        tree, manifest = _read_part(directory, step, each)
        saves.add(runs.save_of(manifest))
        parts.append({part: tree[part] for part in ("session", "world")})  # keep one model in memory only
        if each == rank % writers:
            kept = tree
    kept["world"] = reshard.fold_positions([part["world"] for part in parts], rank, world)
    if rank >= writers:  # two workers must not draw the same random numbers
        kept["random"] = random_state()
    sessions = [part["session"] for part in parts]
    apart = any(AGREED_KEY in memory for session in sessions for memory in session["state"].values())
    recipe = sessions[0]["recipe"]
    news = reshard.describe(os.fspath(directory), step, writers, world, recipe=recipe, apart=apart)
    found.append(LoadedCheckpoint(kept, sessions, runs.run_of(manifest), news))
    return saves.pop() if len(saves) == 1 else ""


def _read_part(directory: str | os.PathLike[str], step: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    tree, manifest = checkpoint.read(directory, step, rank)
    refuse_other_tree(tree, f"{os.fspath(directory)}, step {step}, rank {rank}")
    return tree, manifest


def states(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of all parts and of the global random generators."""
    return {**{name: part.state_dict() for name, part in parts.items()}, "random": random_state()}


def put_back(parts: Mapping[str, Stateful], tree: Mapping[str, Any]) -> None:
    """Restore the parts that the tree contains; the generators first, since the world's shards use them."""
    set_random_state(tree["random"])
    for name, part in parts.items():
        if tree.get(name):
            part.load_state_dict(tree[name])


# -- a path without a checkpoint ---------------------------------------------------------------------------------------


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
