"""Shard state transfer: a shard's state as a file, in pieces that fit into messages, for checkpoints.

A worker pulls the pieces while no other worker pushes. To restore a state, it pushes all pieces, and the server adopts
the state after the last one. A piece may arrive twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from gossamer.base.json_text import read_json
from gossamer.errors import MalformedError
from gossamer.train.checkpoint import unflatten
from gossamer.train.checkpoint.files import MALFORMED, pieces_of

PIECE_BYTES = 1 << 20  # accepted by every server and worker, however small the model
LARGEST_FACTOR = 64  # maximum size of a state in multiples of the parameters, with room for optimizers and deltas
SLACK_BYTES = 1 << 26


def file_of(state: Mapping[str, Any]) -> bytes:
    """Encode a state as a safetensors file."""
    return b"".join(bytes(piece) for piece in pieces_of(state))


def state_of(content: bytes) -> dict[str, Any]:
    """The inverse of `file_of`. Raises MalformedError."""
    try:
        header = read_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        state: dict[str, Any] = unflatten(header["__metadata__"]["tree"], load(content))
        return state
    except MALFORMED as error:
        raise MalformedError(f"a shard's state cannot be read ({type(error).__name__}: {error})") from error


def piece(content: bytes, index: int) -> Tensor:
    """Piece `index`: (n,) of uint8."""
    part = content[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
    return torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.zeros(0, dtype=torch.uint8)


def count_of(nbytes: int) -> int:
    """Number of pieces."""
    return -(-nbytes // PIECE_BYTES)


class ReceivedPieces:
    """Pieces of a state that a server has received. A new name starts a new transfer."""

    def __init__(self, parameter_bytes: int) -> None:
        self._most_bytes = LARGEST_FACTOR * parameter_bytes + SLACK_BYTES
        self._name, self._pieces, self._done = "", dict[int, bytes](), ""

    def add(self, about: str, payload: tuple[Tensor, ...]) -> dict[str, Any] | None:
        """Add a piece. Returns the whole state after the last missing piece, otherwise None. Raises MalformedError."""
        try:
            settings = read_json(about)
            name, index, nbytes = str(settings["name"]), int(settings["index"]), int(settings["nbytes"])
            (tensor,) = payload
            if not 0 < nbytes <= self._most_bytes or not 0 <= index < count_of(nbytes):
                raise ValueError(f"piece {index} of {nbytes} bytes")
            if tensor.dtype != torch.uint8 or len(tensor) != min(PIECE_BYTES, nbytes - index * PIECE_BYTES):
                raise ValueError(f"{tuple(tensor.shape)} of {tensor.dtype} for piece {index} of {nbytes} bytes")
        except MALFORMED as error:
            raise MalformedError(f"a piece of a shard's state is invalid ({type(error).__name__}: {error})") from error
        if name == self._done:
            return None
        if name != self._name:
            self._name, self._pieces = name, {}
        self._pieces[index] = tensor.numpy().tobytes()
        if len(self._pieces) < count_of(nbytes):
            return None
        content = b"".join(self._pieces[each] for each in range(count_of(nbytes)))
        self._done, self._name, self._pieces = name, "", {}
        return state_of(content)


def described(content: bytes, name: str) -> Iterator[tuple[str, Tensor]]:
    """(description, piece) of all pieces of a state."""
    for index in range(count_of(len(content))):
        yield json.dumps({"name": name, "index": index, "nbytes": len(content)}), piece(content, index)
