"""Checkpoint files: stages, completes, prunes and reads one rank's part of a step on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.base import bounded_file
from gossamer.base.json_text import read_json
from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.train.checkpoint.disk_space import room_text
from gossamer.train.checkpoint.fsync import link_file, make_folder, sync_folder, write_file
from gossamer.train.checkpoint.pytree import DIGEST_BYTES, FORMAT_DTYPES, chunks, unflatten
from gossamer.train.checkpoint.snapshot import Flat

# What parsing raises where a file holds something else than was written
MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError, ValueError)

REPLACED = "replaced"  # a folder beside the steps: the step that is being written anew, as it was


def _header(text: str, tensors: dict[str, Tensor]) -> bytes:
    """The format's header: its length, then JSON, padded so that the data begin at a multiple of eight bytes."""
    places: dict[str, Any] = {"__metadata__": {"tree": text}}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        dtype, shape = FORMAT_DTYPES[tensor.dtype], list(tensor.shape)
        places[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def pieces_of(tree: Any) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece.

    Not the library's own writer: that one refuses tensors that share memory, and cannot be hashed and synced on the
    way. Its reader reads what this writes.
    """
    flat = Flat.of(tree)
    yield _header(flat.text, _in_order(flat))
    for tensor in _in_order(flat).values():
        yield from chunks(tensor)


def _in_order(flat: Flat) -> dict[str, Tensor]:
    """Widest elements first, so that each tensor begins at a multiple of its element's size."""
    return dict(sorted(flat.tensors.items(), key=lambda item: -item[1].itemsize))


def nbytes_of(tree: Any) -> int:
    """The size of the file that a tree makes."""
    flat = Flat.of(tree)
    return len(_header(flat.text, _in_order(flat))) + sum(tensor.nbytes for tensor in flat.tensors.values())


def _folder(directory: str | os.PathLike[str], step: int) -> Path:
    return Path(directory) / f"step-{step:08d}"


def _data(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def _manifest(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def part_files(directory: str | os.PathLike[str], step: int, rank: int) -> tuple[Path, Path]:
    """(data, manifest) of one rank's part."""
    folder = _folder(directory, step)
    return _data(folder, rank), _manifest(folder, rank)


def parts_of(directory: str | os.PathLike[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(step, rank, manifest) of every part in a directory, of whatever rank."""
    for step, folder in step_folders(Path(directory)).items():
        for rank in _ranks_from(0, folder):
            data, manifest = part_files(directory, step, rank)
            if data.is_file() and manifest.is_file():
                with contextlib.suppress(CheckpointError, FileNotFoundError):
                    yield step, rank, _read_manifest(manifest)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


@contextlib.contextmanager
def _all_or_nothing(directory: str | os.PathLike[str], step: int, rank: int) -> Iterator[None]:
    """Remove temporary files where writing fails, and raise CheckpointError."""
    try:
        yield
    except CheckpointError:
        abandon(directory, step, rank)
        raise
    except OSError as error:
        abandon(directory, step, rank)
        raise CheckpointError(
            f"Writing the checkpoint of step {step} to {directory} failed: {error.strerror or error}. Earlier "
            f"checkpoints are untouched. {room_text(directory, error)}"
        ) from error


def stage(directory: str | os.PathLike[str], step: int, rank: int, tree: Any) -> str:
    """Write this rank's tree (see `flatten`), or a `Flat`, under a temporary name and sync it; returns its digest.

    A complete checkpoint of the same step stays what it is until `complete` replaces it.
    """
    return stage_pieces(directory, step, rank, pieces_of(tree))


def stage_pieces(directory: str | os.PathLike[str], step: int, rank: int, pieces: Iterable[bytes | memoryview]) -> str:
    """As `stage`, a file as it was on another machine."""
    folder = _folder(directory, step)
    with _all_or_nothing(directory, step, rank):
        make_folder(folder)
        return write_file(_temporary(_data(folder, rank)), pieces)


def abandon(directory: str | os.PathLike[str], step: int, rank: int) -> None:
    """Remove what `stage` wrote for this step."""
    folder = _folder(directory, step)
    _remove_temporaries(folder, rank)
    _remove_if_empty(folder)


def keep_replaced(directory: str | os.PathLike[str], step: int, rank: int) -> None:
    """Let a complete checkpoint of this step be found in `directory`/replaced while it is written anew.

    Where one lies there already, a save was cut short, and what is there may be all that the ranks have in common.
    """
    aside = Path(directory) / REPLACED
    if step not in complete_steps(directory, rank) or step in complete_steps(aside, rank):
        return
    folder, place = _folder(directory, step), _folder(aside, step)
    with _all_or_nothing(directory, step, rank):
        make_folder(place)
        for path in (_data, _manifest):  # in this order: no manifest without what it describes
            link_file(path(folder, rank), path(place, rank))
            sync_folder(place)


def complete(
    directory: str | os.PathLike[str],
    step: int,
    rank: int,
    digests: list[str],
    about: dict[str, Any],
    keep: int | None = 2,
) -> None:
    """Make the staged file this rank's checkpoint of `step`, on disk when this returns; then `prune`.

    digests: every rank's, by rank; about: what describes the run, kept in the manifest. keep: None removes nothing.
    """
    content = {"step": step, "rank": rank, "world": len(digests), "digests": digests, "about": about}
    put_in_place(directory, step, rank, json.dumps(content, indent=1).encode())
    if keep is not None:
        prune(directory, step, rank, len(digests), keep)


def put_in_place(directory: str | os.PathLike[str], step: int, rank: int, description: bytes) -> None:
    """Give the staged file its name, with a manifest of this content."""
    folder = _folder(directory, step)
    data, manifest = part_files(directory, step, rank)
    with _all_or_nothing(directory, step, rank):
        # All that needs space comes before the old files of this step, if any, are replaced. In between there is no
        # manifest, so at no moment does one describe a file that is not its own.
        write_file(_temporary(manifest), [description])
        if manifest.exists():
            manifest.unlink()
            sync_folder(folder)
        _temporary(data).replace(data)
        sync_folder(folder)
        _temporary(manifest).replace(manifest)
        sync_folder(folder)
        sync_folder(folder.parent)


def prune(directory: str | os.PathLike[str], step: int, rank: int, world: int, keep: int) -> None:
    """Remove this rank's older checkpoints, once `step` is complete on all ranks: its newest `keep` stay.

    Rank 0 also removes the files of ranks beyond the world size. What cannot be removed is said.
    """
    try:
        _prune(Path(directory), step, rank, world, keep)
    except OSError as error:
        notice(f"Step {step} is saved, but older checkpoints in {directory} could not be removed: {error}")


def _prune(directory: Path, step: int, rank: int, world: int, keep: int) -> None:
    """Remove temporary files, what was replaced, and all but the `keep` newest complete steps up to this one."""
    kept = [other for other in complete_steps(directory, rank) if other <= step][-keep:]
    for other in step_folders(directory):
        folder = _folder(directory, other)
        _remove_temporaries(folder, rank)
        if other < step and other not in kept:
            _remove_part(folder, rank, world)
    for folder in step_folders(directory / REPLACED).values():
        _remove_part(folder, rank, world)
    _remove_if_empty(directory / REPLACED)


def _remove_part(folder: Path, rank: int, world: int) -> None:
    for each in (rank, *(_ranks_from(world, folder) if rank == 0 else ())):
        _manifest(folder, each).unlink(missing_ok=True)
        _data(folder, each).unlink(missing_ok=True)
    _remove_if_empty(folder)


def _ranks_from(first: int, folder: Path) -> list[int]:
    names = (re.fullmatch(r"rank-(\d+)", path.stem) for path in folder.glob("rank-*"))
    return sorted({int(name[1]) for name in names if name and int(name[1]) >= first})


def _remove_temporaries(folder: Path, rank: int) -> None:
    for path in (_data(folder, rank), _manifest(folder, rank)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _temporary(path).unlink()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def step_folders(directory: Path) -> dict[int, Path]:
    """Folders of steps, complete or not, by step."""
    names = ((path, re.fullmatch(r"step-(\d+)", path.name)) for path in directory.glob("step-*"))
    return dict(sorted((int(name[1]), path) for path, name in names if name))


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Those of a step's manifests that can be read."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            found.append(_read_manifest(path))
    return found


def complete_steps(directory: str | os.PathLike[str], rank: int) -> list[int]:
    """The steps of which this rank's file and manifest are there, ascending."""
    places = ((step, _folder(directory, step)) for step in step_folders(Path(directory)))
    return [step for step, folder in places if _manifest(folder, rank).is_file() and _data(folder, rank).is_file()]


def writers(directory: str | os.PathLike[str], step: int) -> int | None:
    """The world size that wrote this step, by the first of its manifests that can be read; None where none can."""
    return next((manifest["world"] for manifest in manifests(_folder(directory, step))), None)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def intact(directory: str | os.PathLike[str], step: int, rank: int) -> bool:
    """Whether a part is what its manifest tells, which takes reading all of it."""
    data, manifest = part_files(directory, step, rank)
    try:
        return bool(_read_manifest(manifest)["digests"][rank] == _file_digest(data))
    except (CheckpointError, OSError, IndexError):
        return False


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = read_json(bounded_file.read_bytes(path))
        if not isinstance(manifest, dict):
            raise TypeError("it is no JSON object")
        digests, world = manifest["digests"], manifest["world"]
        if not isinstance(digests, list) or not isinstance(world, int) or not len(digests) == world > 0:
            raise ValueError(f"{world!r} workers wrote it, and it has digests of {digests!r}")
        return manifest
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}), so what its step holds cannot be verified. Remove "
            f"{path.parent} and load an earlier step."
        ) from error


def read(directory: str | os.PathLike[str], step: int, rank: int) -> tuple[Any, dict[str, Any]]:
    """This rank's tree and manifest of a complete step, verified; tensors are on the CPU.

    Raises CheckpointError for what is damaged, and OSError where the disk does not give it.
    """
    path = _data(_folder(directory, step), rank)
    if step not in complete_steps(directory, rank):
        raise CheckpointError(
            f"{directory} holds no complete checkpoint of step {step} for rank {rank}; complete are the steps "
            f"{complete_steps(directory, rank)}. Load one of these."
        )
    manifest = _read_manifest(_manifest(path.parent, rank))
    expected = manifest["digests"][rank] if rank < manifest["world"] else "none"
    found = _file_digest(path)
    if expected != found:
        raise CheckpointError(
            f"{path} is damaged: its digest is {found} and should be {expected}, so its contents cannot be trusted. "
            f"Remove {path.parent} and load an earlier step."
        )
    try:
        with safe_open(path, framework="pt") as file:
            # Cloned, because the file is mapped into memory and later saves remove it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return unflatten(file.metadata()["tree"], tensors), manifest
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} has the digest that its manifest tells and holds no checkpoint ({type(error).__name__}: {error}): "
            f"another program wrote it. Remove {path.parent} and load an earlier step."
        ) from error
