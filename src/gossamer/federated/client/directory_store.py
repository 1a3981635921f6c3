"""Directory store: a device's state on disk, written anew and then moved into place, so that one of both is whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gossamer.errors import CheckpointError
from gossamer.federated.client.store import ClientState, ClientStore

NUMBERS = ("round", "version", "residual_version")


class DirectoryStore(ClientStore):
    """DIRECTORY/client-NUMBER.safetensors. A device without one is new."""

    def __init__(self, directory: str | os.PathLike[str], client: int) -> None:
        self._path = Path(directory) / f"client-{client}.safetensors"

    def load(self) -> ClientState:
        """Raises CheckpointError for a damaged file."""
        try:
            read = self._path.read_bytes()
        except FileNotFoundError:
            return ClientState()
        try:
            tensors = load(read)
            about = json.loads(bytes(tensors.pop("about").tolist()))
            residuals = [dict[str, Tensor]() for _ in range(about["residuals"])]
            memory: dict[str, Tensor] = {}
            replica: dict[int, Tensor] = {}
            for name, tensor in tensors.items():
                kind, _, rest = name.partition("/")
                if kind == "replica":
                    replica[int(rest)] = tensor
                elif kind == "memory":
                    memory[rest] = tensor
                else:
                    place, _, key = rest.partition("/")
                    residuals[int(place)][key] = tensor
            return ClientState(
                **dict[str, Any]((key, int(about[key])) for key in NUMBERS),
                replica=tuple(replica[place] for place in sorted(replica)),
                residuals=tuple(residuals),
                memory=memory,
            )
        except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{self._path} is damaged ({error}), so what this device still owes cannot be read. Remove it: the "
                "device begins anew, and loses what its feedback kept"
            ) from error

    def save(self, state: ClientState) -> None:
        """Raises CheckpointError where the disk is full; the state before stays."""
        about = {key: getattr(state, key) for key in NUMBERS} | {"residuals": len(state.residuals)}
        tensors = {"about": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)}
        tensors |= {f"replica/{place}": tensor.contiguous() for place, tensor in enumerate(state.replica)}
        tensors |= {f"memory/{key}": tensor.contiguous() for key, tensor in state.memory.items()}
        for place, residuals in enumerate(state.residuals):
            tensors |= {f"residual/{place}/{key}": tensor.contiguous() for key, tensor in residuals.items()}
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(save(tensors))
            part.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise CheckpointError(
                f"{self._path} cannot be written ({error}), so the device would forget what it still owes. Free some "
                "space: the state before is unchanged"
            ) from error
