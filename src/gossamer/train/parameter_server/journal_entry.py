"""Journal entries: the commands that change a shard, and their encoding in a log file with a possibly torn end."""

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

PREFIX = struct.Struct("<QI")  # size of the body in bytes, and its CRC-32
HEADER_LENGTH = struct.Struct("<I")  # size of the header within the body, in bytes
NO_STAMP = Stamp(worker=0, step=-1)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A command of ServerShard and its arguments, sufficient to repeat it."""

    command: str
    stamp: Stamp = NO_STAMP
    version: int = 0
    lr_factor: float = 1.0
    about: str = ""
    payload: Payload = ()


class Journal(Protocol):
    """Destination of entries, written before the shard changes and before any worker gets an answer."""

    def write(self, entry: Entry) -> None:
        """Append an entry. Never raises; a journal that cannot be written prints one notice."""

    def start_over(self) -> None:
        """Start again after the state was replaced. Never raises."""

    def close(self) -> None:
        """Release files."""


class NullJournal:
    """A journal that stores nothing."""

    def write(self, entry: Entry) -> None:
        pass

    def start_over(self) -> None:
        pass

    def close(self) -> None:
        pass


def encode_entry(entry: Entry) -> list[bytes | memoryview]:
    """Buffers of an entry: length, checksum, a header as JSON, and the tensors' bytes, without a copy."""
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
    """All complete entries of a file of `size` bytes, each with the offset of its end; stops at the first torn one."""
    end = 0
    while size - end >= PREFIX.size:
        length, checksum = PREFIX.unpack(file.read(PREFIX.size))
        if not HEADER_LENGTH.size <= length <= size - end - PREFIX.size:  # file systems may leave zeros at the end
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
    """The tensor at offset `start`, and the offset of its end."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise MalformedError(
            f"a journal has a tensor of dtype {name!r}, which this version of torch does not have. Install the version "
            "that wrote it, or start with an empty directory"
        )
    end = start + prod(shape) * dtype.itemsize
    raw = bytearray(body[start:end])
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape), end
