"""Entries as bytes in a file, of which the last may be torn."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from gossamer.checkpoint.pytree import chunks
from gossamer.core.layout import dtype_name
from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Stamp
from gossamer.errors import MalformedError

FRONT = struct.Struct("<QI")  # bytes of the body, and their checksum
HEAD = struct.Struct("<I")  # bytes of the header within the body
Pieces = list[bytes | memoryview]


def pieces(entry: Entry) -> Pieces:
    """An entry's bytes: length, checksum, a header as JSON, and the tensors' own bytes, which are not copied."""
    header = json.dumps(
        {
            "what": entry.what,
            "stamp": entry.stamp,
            "version": entry.version,
            "rate": entry.rate,
            "about": entry.about,
            "tensors": [(dtype_name(each.dtype), each.shape) for each in entry.payload],
        }
    ).encode()
    body: Pieces = [HEAD.pack(len(header)) + header, *(chunk for each in entry.payload for chunk in chunks(each))]
    checksum = 0
    for piece in body:
        checksum = zlib.crc32(piece, checksum)
    return [FRONT.pack(sum(len(piece) for piece in body), checksum), *body]


def entries(file: BinaryIO, size: int) -> Iterator[tuple[Entry, int]]:
    """All whole entries of a file of `size` bytes, and where each ends. What follows the first torn one is nothing."""
    at = 0
    while size - at >= FRONT.size:
        length, checksum = FRONT.unpack(file.read(FRONT.size))
        if length > size - at - FRONT.size:
            return
        body = file.read(length)
        if zlib.crc32(body) != checksum:
            return
        at += FRONT.size + length
        yield _entry(body), at


def _entry(body: bytes) -> Entry:
    (length,) = HEAD.unpack_from(body)
    start = HEAD.size + length
    read: dict[str, Any] = json.loads(body[HEAD.size : start])
    found: list[Tensor] = []
    for name, shape in read.pop("tensors"):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise MalformedError(f"a journal holds a tensor of {name!r}, which is no dtype")
        size = prod(shape) * dtype.itemsize
        raw = bytearray(body[start : start + size])
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if size else torch.empty(0, dtype=dtype)
        found.append(flat.reshape(shape))
        start += size
    return Entry(**{**read, "stamp": Stamp(*read["stamp"]), "payload": tuple(found)})


NOBODY = Stamp(worker=0, step=-1)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A command of Shard by its name, and what it was given."""

    what: str
    stamp: Stamp = NOBODY
    version: int = 0
    rate: float = 1.0
    about: str = ""
    payload: Payload = ()


class Journal(Protocol):
    """Where entries are written before anything changes and before anyone is told."""

    def write(self, entry: Entry) -> None:
        """Keep the entry. Raises nothing: who cannot write says so once."""

    def close(self) -> None:
        """Let go of files."""


class Forgetful:
    """A journal that keeps nothing."""

    def write(self, entry: Entry) -> None:
        pass

    def close(self) -> None:
        pass
