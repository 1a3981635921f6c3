"""TensorBoard: event files as its own SummaryWriter makes them, of the few fields that scalars need.

file    record*
record  length: uint64  masked CRC-32C of length: uint32  event  masked CRC-32C of event: uint32, little-endian
event   wall_time = 1: double  step = 2: int64  file_version = 3: string  summary = 5 {value = 1 {tag = 1, simple_value = 2}*}
source  tensorflow/core/util/event.proto, framework/summary.proto, lib/io/record_writer.h
"""  # noqa: E501  # a field a line

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from gossamer.observe.exporters.crc32c import crc32c, masked
from gossamer.observe.exporters.points import Point
from gossamer.observe.exporters.whole_records import RecordsFile

VERSION = b"brain.Event:2"
DOUBLE, BYTES, FLOAT = 1, 2, 5  # wire types of protobuf
LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_files = count()  # of this process


class TensorBoardWriter:
    """Writes a new file into `folder`, as TensorBoard wants it: a folder is a run, and its files follow each other."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self._file = RecordsFile(folder / name)

    def write(self, points: Sequence[Point]) -> None:
        version = b"" if self._file.bytes else record(event(time.time(), 0, _text(3, VERSION)))
        self._file.append(version + b"".join(record(scalars(point)) for point in points))

    def close(self) -> None:
        self._file.close()


def scalars(point: Point) -> bytes:
    """An event with one scalar for each value."""
    values = [
        _text(1, _text(1, name.encode(errors="replace")) + _key(2, FLOAT) + struct.pack("<f", single(value)))
        for name, value in point.values.items()
    ]
    return event(point.at, point.step, _text(5, b"".join(values)))


def event(at: float, step: int, content: bytes) -> bytes:
    """content: the event's file_version or summary."""
    counted = _key(2, 0) + _varint(step) if step else b""  # as proto3 leaves out what is zero
    return _key(1, DOUBLE) + struct.pack("<d", at) + counted + content


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def single(value: float) -> float:
    """As float32: beyond its range infinite, as it is everywhere else; struct would refuse it."""
    return value if abs(value) <= LARGEST or value != value else float("inf") if value > 0 else -float("inf")


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked(crc32c(data)))


def _text(field: int, content: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(content)) + content


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # negative ones are written so
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))
