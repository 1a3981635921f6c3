"""Distributed checkpoint (DCP): exports a checkpoint to torch's format, and imports one that torch wrote.

    dcp.export("checkpoints", "exported")          # readable by torch.distributed.checkpoint.load
    dcp.import_("exported", model, optimizer)      # on every rank, before gossamer.attach

    {"model": model.state_dict(), "optimizer": {"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}}

The optimizer's state is keyed by parameter names, as in torch's get_optimizer_state_dict. The state of a recipe, such
as residuals, is not included: use session.save and session.load for it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.optim import Optimizer

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint import reshard
from gossamer.train.checkpoint.files import MALFORMED, read
from gossamer.train.checkpoint.listing import CheckpointSummary, newest
from gossamer.train.checkpoint.state import parameter_names

State = dict[str, Any]
COMPILED = "_orig_mod."  # prefix of torch.compile; torch's own tools remove it from names as well
FORMAT_CLASSES = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
MOST_PLAIN_BYTES = 2**30  # of the metadata, and of each value that is not a tensor
METADATA = "torch.distributed.checkpoint.metadata"


def export(directory: str | os.PathLike[str], to: str | os.PathLike[str]) -> CheckpointSummary:
    """Write model and optimizer of the newest checkpoint in `directory` to the new folder `to`.

    After local training these are the parameters that the workers agree on and rank 0's optimizer. Call it once, in
    any process.

    Returns:
        A summary of the exported checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint, it is sharded, or `to` exists or cannot be written.
    """
    found, target = newest(directory), Path(to)
    if target.exists():
        raise CheckpointError(f"{target} exists already and is not overwritten. Name a new folder.")
    tree, _ = read(found.directory, found.step, 0)
    sessions = [tree["session"]]
    if sessions[0].get("shards"):
        raise CheckpointError(
            f"the model in {os.fspath(directory)!r} is sharded over several ranks, and torch's format needs the layout "
            "of the shards, which only the job has: call torch.distributed.checkpoint.save(model.state_dict(), "
            "checkpoint_id=...) in it, on every rank."
        )
    if reshard.agreed(sessions):  # of local training: ranks have separate models
        sessions += [read(found.directory, found.step, rank)[0]["session"] for rank in range(1, found.world)]
    model = {**tree["model"], **{name: x for name, x in reshard.agreed(sessions).items() if name in tree["model"]}}
    optimizer = _by_name(tree["optimizer"], tree.get("optimizer_names"))
    state = {"model": {_plain(name): value for name, value in model.items()}, "optimizer": optimizer}
    partial = target.with_name(target.name + ".partial")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: one process writes
            save_dcp(state, checkpoint_id=partial, no_dist=True)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{target} could not be written: {error}. Free some space, or name another.") from error
    return found


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")


def _by_name(optimizer: Mapping[str, Any], names: list[list[str]] | None) -> State:
    """An optimizer's state_dict keyed by names; unchanged if the checkpoint's version saved no names."""
    if not names:
        return dict(optimizer)
    plain = [[_plain(name) for name in each] for each in names]
    pairs = list(zip(optimizer["param_groups"], plain, strict=True))
    known = {number: name for group, each in pairs for number, name in zip(group["params"], each, strict=True)}
    return {
        "state": {known[number]: value for number, value in optimizer["state"].items()},
        "param_groups": [{**group, "params": each} for group, each in pairs],
    }


def import_(directory: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> State:
    """Load model and optimizer state from a folder that torch wrote. Every rank calls it, before gossamer.attach.

    Args:
        directory: written by torch.distributed.checkpoint.save({"model": ..., "optimizer": ...}), by any number of
            ranks.
        model, optimizer: receive the state.

    Returns:
        All other entries of the folder, by name.

    Raises:
        CheckpointError: the folder does not fit. If names differ, nothing was changed.
    """
    state = load(directory)
    try:
        parts = {name: state.pop(name) for name in ("model", "optimizer") if name in state}
        if "model" not in parts:
            raise KeyError("it has no 'model', but " + (", ".join(map(repr, sorted(state))) or "nothing"))
        own = model.state_dict()
        remote = {name: parts["model"][_plain(name)] for name in own}
        wanted = None if optimizer is None else _by_number(parts["optimizer"], model, optimizer)
        model.load_state_dict(remote)
        if optimizer is not None and wanted is not None:
            optimizer.load_state_dict(wanted)
    except MALFORMED as error:
        raise CheckpointError(
            f"the contents of {os.fspath(directory)} do not fit ({type(error).__name__}: {error}). Build the model and "
            'the optimizer as they were when it was written, as {"model": model.state_dict(), "optimizer": '
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)}."
        ) from error
    return state


def _by_number(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> State:
    """The inverse of `_by_name`, also for a state without names, with numbers as text for keys."""
    groups, state = [], {}
    number = 0
    for group, names in zip(saved["param_groups"], parameter_names(model, optimizer), strict=True):
        begin = number
        for name in names:
            found = saved.get("state", {}).get(_plain(name), saved.get("state", {}).get(str(number)))
            if found is not None:
                state[number] = found
            number += 1
        groups.append({**group, "params": list(range(begin, number))})
    if len(state) != len(saved.get("state", {})):
        raise KeyError(f"the optimizer's state is of other parameters: {', '.join(sorted(saved['state']))}")
    return {"state": state, "param_groups": groups}


def load(directory: str | os.PathLike[str]) -> State:
    """Read a folder of torch's format, in one process, on the CPU. Raises CheckpointError.

    The format's metadata is a pickle. Only the format's own classes are loaded from it, and values other than tensors
    must be plain, so that no code in it is executed.
    """
    state: State = {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            reader, planner = _PlainReader(directory), _PlainPlanner()  # type: ignore[no-untyped-call]
            reader.read_metadata()  # in torch 2.10 the next line hides why metadata is refused
            _load_state_dict(state, reader, planner=planner, no_dist=True)
    except (OSError, pickle.UnpicklingError, EOFError, CheckpointException, *MALFORMED) as error:
        raise CheckpointError(
            f"{os.fspath(directory)} cannot be read as torch's distributed checkpoint ({type(error).__name__}: "
            f"{error}). Name a folder that torch.distributed.checkpoint.save wrote."
        ) from error
    return state


class _PlainUnpickler(pickle.Unpickler):
    """Refuses classes that are not part of the format."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # the module of paths in Python 3.13 only
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in FORMAT_CLASSES or (module == METADATA and "." not in name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of the format")


class _PlainReader(FileSystemReader):
    """torch's reader, which reads the metadata as plain data and compares its sizes with those of the files."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        with (folder / ".metadata").open("rb") as file:
            if (nbytes := os.fstat(file.fileno()).st_size) > MOST_PLAIN_BYTES:
                raise ValueError(f"its metadata has {nbytes:,} bytes, but at most {MOST_PLAIN_BYTES:,} are read")
            metadata = _PlainUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"its metadata is a {type(metadata).__name__}")
        due = sum(
            each.size.numel() * each.properties.dtype.itemsize
            for each in metadata.state_dict_metadata.values()
            if isinstance(each, TensorStorageMetadata)
        )
        there = sum(path.stat().st_size for path in folder.iterdir())
        if due > there:
            raise ValueError(f"its tensors have {due:,} bytes, but its files only {there:,}")
        for index, info in (metadata.storage_data or {}).items():
            is_plain = isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata)
            if is_plain and info.length > MOST_PLAIN_BYTES:
                raise ValueError(f"{index.fqn} has {info.length:,} bytes, but at most {MOST_PLAIN_BYTES:,} are read")
            if Path(info.relative_path).name != str(info.relative_path):
                raise ValueError(f"it names the file {info.relative_path}, which is in another folder")
        return metadata


class _PlainPlanner(_EmptyStateDictLoadPlanner):
    """torch's planner for all entries, which reads values as plain data."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        plain = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)
        else:
            self.state_dict[read_item.dest_index.fqn] = plain
