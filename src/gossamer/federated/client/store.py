"""Client store: the state of a device between rounds, in memory or in a directory.

A state is written to a new file that is then renamed, so that the directory always has one complete state."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gossamer.base import system
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Stamp
from gossamer.errors import CheckpointError
from gossamer.federated.messages import Report
from gossamer.train.checkpoint.fsync import make_folder, write_file


@dataclass(frozen=True)
class PendingContribution:
    """A contribution that may have been sent and has no receipt yet. A restarted device sends it again."""

    stamp: Stamp
    report: Report
    payload: Payload
    counted: ClientState  # the device's state once it is counted


@dataclass
class ClientState:
    """State of a device between rounds; empty at first."""

    lineage: str = ""  # of the versions that this state refers to
    round: int = -1  # the last with a known outcome
    version: int = -1  # of the replica
    replica: Payload = ()  # the public blocks of that version: (n,) each
    residuals: tuple[dict[str, Tensor], ...] = ()  # the compressor's state, by block
    residual_version: int = -1  # version of the replica when the residuals were last updated
    memory: dict[str, Tensor] = field(default_factory=dict)  # the strategy's
    told: int = 0  # contributions with local noise that may have left the device
    pending: PendingContribution | None = None


class ClientStore(Protocol):
    """Storage of one device's state."""

    def load(self) -> ClientState: ...

    def save(self, state: ClientState) -> None: ...


class MemoryStore:
    """Keeps the state in memory, for the lifetime of the process."""

    def __init__(self) -> None:
        self._state = ClientState()

    def load(self) -> ClientState:
        return self._state

    def save(self, state: ClientState) -> None:
        self._state = state


NUMBERS = ("round", "version", "residual_version", "told")


class DirectoryStore(ClientStore):
    """Keeps the state in DIRECTORY/client-NUMBER.safetensors. A device without that file is new.

    A saved state survives a power failure. Otherwise a device could forget that a contribution was counted, and would
    send the same residual twice.
    """

    def __init__(self, directory: str | os.PathLike[str], client: int, *, durable: bool = True) -> None:
        """durable: False skips fsync, for a directory that is not used after this process."""
        self._path, self._durable = Path(directory) / f"client-{client}.safetensors", durable

    def load(self) -> ClientState:
        """Raises CheckpointError for a damaged file."""
        try:
            read = self._path.read_bytes()
        except FileNotFoundError:
            return ClientState()
        try:
            tensors = load(read)
            about = json.loads(bytes(tensors.pop("about").tolist()))
            state = ClientState(
                **dict[str, Any]((key, int(about[key])) for key in NUMBERS),
                lineage=str(about.get("lineage", "")),
                replica=_list(tensors, "replica"),
                residuals=_residuals(tensors, "residual", about["residuals"]),
                memory=_under(tensors, "memory"),
            )
            return replace(state, pending=_pending(about.get("pending"), tensors, state))
        except (SafetensorError, ValueError, KeyError, IndexError, TypeError, msgspec.ValidationError) as error:
            raise CheckpointError(
                f"{self._path} is damaged ({error}), so the residuals of this device are lost. Remove the file: the "
                "device then starts with empty residuals"
            ) from error

    def save(self, state: ClientState) -> None:
        """Raises CheckpointError if the file cannot be written; the previous state stays."""
        about: dict[str, Any] = {key: getattr(state, key) for key in ("lineage", *NUMBERS)}
        about["residuals"] = len(state.residuals)
        tensors = _named("replica", state.replica) | {f"memory/{key}": each for key, each in state.memory.items()}
        tensors |= _named_residuals("residual", state.residuals)
        pending = state.pending
        if pending is not None:
            about["pending"] = {
                "stamp": list(pending.stamp),
                "report": msgspec.to_builtins(pending.report),
                "residuals": len(pending.counted.residuals),
            }
            tensors |= _named("payload", pending.payload)
            tensors |= {f"after/{key}": each for key, each in pending.counted.memory.items()}
            tensors |= _named_residuals("residual after", pending.counted.residuals)
        tensors = {key: each.clone().contiguous() for key, each in tensors.items()}  # no shared memory
        tensors["about"] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
        part = self._path.with_suffix(".part")
        try:
            self._write(part, save(tensors))
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise CheckpointError(
                f"{self._path} cannot be written ({error}), so the residuals of this round would be lost. Free some "
                "space: the previous state is unchanged"
            ) from error

    def _write(self, part: Path, content: bytes) -> None:
        folder = self._path.parent
        if not self._durable:
            folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(self._path)
            return
        make_folder(folder)
        write_file(part, [content])
        part.replace(self._path)
        system.sync_folder(folder)


def _named(kind: str, payload: Payload) -> dict[str, Tensor]:
    return {f"{kind}/{place}": tensor for place, tensor in enumerate(payload)}


def _named_residuals(kind: str, residuals: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{kind}/{place}/{key}": each for place, own in enumerate(residuals) for key, each in own.items()}


def _under(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.partition("/")[2]: each for name, each in tensors.items() if name.startswith(f"{kind}/")}


def _list(tensors: Mapping[str, Tensor], kind: str) -> Payload:
    found = {int(place): tensor for place, tensor in _under(tensors, kind).items()}
    return tuple(found[place] for place in sorted(found))


def _residuals(tensors: Mapping[str, Tensor], kind: str, count: int) -> tuple[dict[str, Tensor], ...]:
    residuals = [dict[str, Tensor]() for _ in range(count)]
    for name, tensor in _under(tensors, kind).items():
        place, _, key = name.partition("/")
        residuals[int(place)][key] = tensor
    return tuple(residuals)


def _pending(
    about: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], state: ClientState
) -> PendingContribution | None:
    """The contribution without a receipt. Its `counted` state has the same replica, with other residuals and memory."""
    if about is None:
        return None
    stamp = Stamp(*map(int, about["stamp"]))
    counted = replace(
        state,
        round=stamp.step,
        residuals=_residuals(tensors, "residual after", about["residuals"]),
        residual_version=state.version,
        memory=_under(tensors, "after"),
    )
    report = msgspec.convert(about["report"], Report, strict=False)
    return PendingContribution(stamp, report, _list(tensors, "payload"), counted)
