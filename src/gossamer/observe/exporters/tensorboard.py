"""TensorBoard: event files of scalars, from the messages and the checksum of tensorboardX (the extra `tensorboard`).

tensorboardX's own writer is not used. It renames tags ("größe %" becomes "gr__e__"), and its thread ends at the first
disk error.

file    record*
record  length: uint64  masked CRC-32C of length: uint32  event  masked CRC-32C of event: uint32, little-endian
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from gossamer.observe.exporters.points import Point, RecordsFile

VERSION = "brain.Event:2"
_files = count()  # of this process


class TensorBoardWriter:
    """Writes a new file into `folder`. TensorBoard reads a folder as a run, with its files in order."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self._file = RecordsFile(folder / name)

    def write(self, points: Sequence[Point]) -> None:
        first = [] if self._file.bytes else [Event(wall_time=time.time(), file_version=VERSION)]
        self._file.append(b"".join(map(record, (*first, *map(scalars, points)))))

    def close(self) -> None:
        self._file.close()


def scalars(point: Point) -> Event:
    """An event with one scalar for each value. A value beyond the range of float32 becomes infinite."""
    values = [
        Summary.Value(tag=name.encode(errors="replace").decode(), simple_value=value)
        for name, value in point.values.items()
    ]
    return Event(wall_time=point.at, step=point.step, summary=Summary(value=values))


def record(event: Event) -> bytes:
    content: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + checksums[0] + content + checksums[1]
