"""Journal entries: the commands that change a shard, and their bytes in a log file of which the last may be torn."""

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

from gossamer.base.json_text import read_json
from gossamer.base.layout import dtype_name
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Stamp
from gossamer.errors import MalformedError
from gossamer.train.checkpoint.pytree import chunks

PREFIX = struct.Struct("<QI")  # bytes of the body, and their CRC-32
HEADER_LENGTH = struct.Struct("<I")  # bytes of the header within the body
NO_STAMP = Stamp(worker=0, step=-1)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A command of ServerShard and its arguments: enough to make the same change again."""

    command: str
    stamp: Stamp = NO_STAMP
    version: int = 0
    lr_factor: float = 1.0
    about: str = ""
    payload: Payload = ()


class Journal(Protocol):
    """Where entries are written, before anything changes and before any worker is told."""

    def write(self, entry: Entry) -> None:
        """Append an entry. Raises nothing: a journal that cannot write gives notice once."""

    def begin_anew(self) -> None:
        """The state was replaced by another. Raises nothing, as `write`."""

    def close(self) -> None:
        """Release files."""


class NullJournal:
    """A journal that keeps nothing."""

    def write(self, entry: Entry) -> None:
        pass

    def begin_anew(self) -> None:
        pass

    def close(self) -> None:
        pass


def encode_entry(entry: Entry) -> list[bytes | memoryview]:
    """Buffers of an entry: length, checksum, a header as JSON, and the tensors' own bytes, which are not copied."""
    header = json.dumps(
        {
            "what": entry.command,
            "stamp": entry.stamp,
            "version": entry.version,
            "rate": entry.lr_factor,
            "about": entry.about,
            "tensors": [(dtype_name(each.dtype), each.shape) for each in entry.payload],
        }
    ).encode()
    body: list[bytes | memoryview] = [HEADER_LENGTH.pack(len(header)) + header]
    body += (chunk for each in entry.payload for chunk in chunks(each))
    checksum = 0
    for buffer in body:
        checksum = zlib.crc32(buffer, checksum)
    return [PREFIX.pack(sum(len(buffer) for buffer in body), checksum), *body]


def read_entries(file: BinaryIO, size: int) -> Iterator[tuple[Entry, int]]:
    """All whole entries of a file of `size` bytes, each with the offset of its end; stops at the first torn one."""
    end = 0
    while size - end >= PREFIX.size:
        length, checksum = PREFIX.unpack(file.read(PREFIX.size))
        if not HEADER_LENGTH.size <= length <= size - end - PREFIX.size:  # zeros, as a file system may leave them
            return
        body = file.read(length)
        if zlib.crc32(body) != checksum:
            return
        end += PREFIX.size + length
        yield _decode(body), end


def _decode(body: bytes) -> Entry:
    (length,) = HEADER_LENGTH.unpack_from(body)
    start = HEADER_LENGTH.size + length
    header: dict[str, Any] = read_json(body[HEADER_LENGTH.size : start])
    payload: list[Tensor] = []
    for name, shape in header["tensors"]:
        tensor, start = _tensor(body, start, name, shape)
        payload.append(tensor)
    return Entry(
        command=header["what"],
        stamp=Stamp(*header["stamp"]),
        version=header["version"],
        lr_factor=header["rate"],
        about=header["about"],
        payload=tuple(payload),
    )


def _tensor(body: bytes, start: int, name: str, shape: list[int]) -> tuple[Tensor, int]:
    """The tensor that lies at `start`, and where it ends."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise MalformedError(
            f"a journal holds a tensor of {name!r}, which is no dtype here: another version of torch wrote it. Install "
            "that one, or start with an empty directory"
        )
    end = start + prod(shape) * dtype.itemsize
    raw = bytearray(body[start:end])
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape), end
