"""Checkpoint files: stages, completes, prunes and reads one rank's part of a step on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.base import bounded_file, system
from gossamer.base.json_text import read_json
from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.train.checkpoint.fsync import link_file, make_folder, write_file
from gossamer.train.checkpoint.pytree import DIGEST_BYTES, FORMAT_DTYPES, chunks, unflatten
from gossamer.train.checkpoint.snapshot import Flat

# Errors raised when parsing a file with unexpected contents
MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError, ValueError)

REPLACED = "replaced"  # a folder next to the steps: the old version of a step that is being replaced


def _header(text: str, tensors: dict[str, Tensor]) -> bytes:
    """The format's header: its length, then JSON, padded to a multiple of eight bytes."""
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

    The library's writer refuses tensors that share memory, and does not allow hashing and syncing while writing. Its
    reader reads this file.
    """
    flat = Flat.of(tree)
    yield _header(flat.text, _in_order(flat))
    for tensor in _in_order(flat).values():
        yield from chunks(tensor)


def _in_order(flat: Flat) -> dict[str, Tensor]:
    """Sort by element size, largest first, so that each tensor is aligned to its element size."""
    return dict(sorted(flat.tensors.items(), key=lambda item: -item[1].itemsize))


def nbytes_of(tree: Any) -> int:
    """The size of a tree's file."""
    flat = Flat.of(tree)
    return len(_header(flat.text, _in_order(flat))) + sum(tensor.nbytes for tensor in flat.tensors.values())


def _folder(directory: str | os.PathLike[str], step: int) -> Path:
    return Path(directory) / f"step-{step:08d}"


def _data(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def _manifest(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def part_files(directory: str | os.PathLike[str], step: int, rank: int) -> tuple[Path, Path]:
    """Paths (data, manifest) of one rank's part."""
    folder = _folder(directory, step)
    return _data(folder, rank), _manifest(folder, rank)


def parts_of(directory: str | os.PathLike[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(step, rank, manifest) of every part in a directory, of all ranks."""
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
    """Context manager that removes temporary files after a failed write and raises CheckpointError."""
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
    """Write and sync this rank's tree (see `flatten`), or a `Flat`, under a temporary name. Returns its digest.

    A complete checkpoint of the same step is kept until `complete` replaces it.
    """
    return stage_pieces(directory, step, rank, pieces_of(tree))


def stage_pieces(directory: str | os.PathLike[str], step: int, rank: int, pieces: Iterable[bytes | memoryview]) -> str:
    """As `stage`, for a file copied from another machine."""
    folder = _folder(directory, step)
    with _all_or_nothing(directory, step, rank):
        make_folder(folder)
        return write_file(_temporary(_data(folder, rank)), pieces)


def abandon(directory: str | os.PathLike[str], step: int, rank: int) -> None:
    """Remove the files that `stage` wrote for this step."""
    folder = _folder(directory, step)
    _remove_temporaries(folder, rank)
    _remove_if_empty(folder)


def keep_replaced(directory: str | os.PathLike[str], step: int, rank: int) -> None:
    """Keep a complete checkpoint of this step in `directory`/replaced while it is replaced.

    If that folder has one already, a save was interrupted, and it may be the only one that all ranks have.
    """
    aside = Path(directory) / REPLACED
    if step not in complete_steps(directory, rank) or step in complete_steps(aside, rank):
        return
    folder, place = _folder(directory, step), _folder(aside, step)
    with _all_or_nothing(directory, step, rank):
        make_folder(place)
        for path in (_data, _manifest):  # in this order: no manifest without its data
            link_file(path(folder, rank), path(place, rank))
            system.sync_folder(place)


def complete(
    directory: str | os.PathLike[str],
    step: int,
    rank: int,
    digests: list[str],
    about: dict[str, Any],
    keep: int | None = 2,
) -> None:
    """Make the staged file this rank's checkpoint of `step`, durably, then `prune`.

    Args:
        digests: of every rank, by rank.
        about: description of the run for the manifest.
        keep: number of checkpoints to keep; None removes nothing.
    """
    content = {"step": step, "rank": rank, "world": len(digests), "digests": digests, "about": about}
    put_in_place(directory, step, rank, json.dumps(content, indent=1).encode())
    if keep is not None:
        prune(directory, step, rank, len(digests), keep)


def put_in_place(directory: str | os.PathLike[str], step: int, rank: int, content: bytes) -> None:
    """Rename the staged file, and write its manifest with this content."""
    folder = _folder(directory, step)
    data, manifest = part_files(directory, step, rank)
    with _all_or_nothing(directory, step, rank):
        # Everything that needs space is written before old files of this step are replaced. In between there is no
        # manifest, so a manifest never describes another file.
        write_file(_temporary(manifest), [content])
        if manifest.exists():
            manifest.unlink()
            system.sync_folder(folder)
        _temporary(data).replace(data)
        system.sync_folder(folder)
        _temporary(manifest).replace(manifest)
        system.sync_folder(folder)
        system.sync_folder(folder.parent)


def prune(directory: str | os.PathLike[str], step: int, rank: int, world: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of this rank, once `step` is complete on all ranks.

    Rank 0 also removes the files of ranks beyond the world size. Failures are reported in a notice.
    """
    try:
        _prune(Path(directory), step, rank, world, keep)
    except OSError as error:
        notice(f"Step {step} is saved, but older checkpoints in {directory} could not be removed: {error}")


def _prune(directory: Path, step: int, rank: int, world: int, keep: int) -> None:
    """Remove temporary files, replaced steps, and all but the `keep` newest complete steps up to this one."""
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
    """The readable manifests of a step."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            found.append(_read_manifest(path))
    return found


def complete_steps(directory: str | os.PathLike[str], rank: int) -> list[int]:
    """Steps for which this rank's file and manifest exist, ascending."""
    places = ((step, _folder(directory, step)) for step in step_folders(Path(directory)))
    return [step for step, folder in places if _manifest(folder, rank).is_file() and _data(folder, rank).is_file()]


def writers(directory: str | os.PathLike[str], step: int) -> int | None:
    """The world size that wrote this step, from the first readable manifest; None without one."""
    return next((manifest["world"] for manifest in manifests(_folder(directory, step))), None)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def intact(directory: str | os.PathLike[str], step: int, rank: int) -> bool:
    """Whether a part has the digest in its manifest; reads all of it."""
    data, manifest = part_files(directory, step, rank)
    try:
        return bool(_read_manifest(manifest)["digests"][rank] == _file_digest(data))
    except (CheckpointError, OSError, IndexError):
        return False


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = read_json(bounded_file.read_bytes(path))
        if not isinstance(manifest, dict):
            raise TypeError("it is not a JSON object")
        digests, world = manifest["digests"], manifest["world"]
        if not isinstance(digests, list) or not isinstance(world, int) or not len(digests) == world > 0:
            raise ValueError(f"{world!r} workers wrote it, but it has the digests {digests!r}")
        return manifest
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}), so its step cannot be verified. Remove "
            f"{path.parent} and load an earlier step."
        ) from error


def read(directory: str | os.PathLike[str], step: int, rank: int) -> tuple[Any, dict[str, Any]]:
    """Read and verify this rank's tree and manifest of a complete step; tensors are on the CPU.

    Raises:
        CheckpointError: the part is damaged or missing.
        OSError: the disk cannot be read.
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
            f"{path} has the digest of its manifest but is not a checkpoint ({type(error).__name__}: {error}): "
            f"another program wrote it. Remove {path.parent} and load an earlier step."
        ) from error


# -- a full disk -------------------------------------------------------------------------------------------------------


FULL = (errno.ENOSPC, errno.EDQUOT)


def room_text(directory: str | os.PathLike[str], error: OSError) -> str:
    """The remedy for a write error; on a full disk it lists the folders in `directory` and their sizes."""
    if error.errno not in FULL:
        return "Free some space or choose another directory, and save again."
    here = Path(directory)
    sizes = sorted(((folder_bytes(path), path.name) for path in _folders(here)), reverse=True)
    held = ", ".join(f"{name} has {nbytes:,} bytes" for nbytes, name in sizes if nbytes)
    runs = any(name.startswith("run-") for _, name in sizes)
    advice = "Remove the folders that you do not need" + (": those named run-... are of other runs" if runs else "")
    return (
        f"{_free(here)}In {here}: {held or 'nothing to remove'}. {advice}, keep fewer checkpoints "
        "(session.save(directory, keep=2)), or choose another directory, and save again."
    )


def _free(here: Path) -> str:
    for place in (here, *here.absolute().parents):
        try:
            return f"{shutil.disk_usage(place).free:,} bytes are free there. "
        except FileNotFoundError:  # nothing was saved yet
            continue
        except OSError:
            break
    return ""


def _folders(here: Path) -> list[Path]:
    try:
        return [path for path in here.iterdir() if path.is_dir() and path.name.startswith(("step-", "run-"))]
    except OSError:
        return []


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # removed in the meantime
                continue
    return total
