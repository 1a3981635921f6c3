"""Frame format: a header of fixed size, a control record, and the bytes of the tensors with their checksum.

    magic  protocol  kind  flags  epoch  sequence  control bytes  tensors  payload bytes  control crc  header crc
    4 s    u8        u8    u16    u64    u64       u32            u32      u64            u32          u32

    control record   the tensors' bytes   payload crc
                                          u32

Little endian; checksums are CRC-32, and the header's covers the control record's: no bit of a frame flips unnoticed.
The payload's checksum trails it: both ends sum a long payload chunk by chunk while other chunks travel. Every length is
compared with a limit before memory is allocated for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from gossamer.errors import MalformedError, MismatchError
from gossamer.kernels.crc import crc32

MAGIC = b"GSMR"
PROTOCOL = 1
CHUNK_BYTES = 2**22  # of a payload, summed at a time; shorter chunks cost more, longer ones are waited for
UNAUTHENTICATED_FRAME_BYTES = 2**16  # the longest frame before the other end has proven the token

_FIELDS = struct.Struct("<4sBBHQQIIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
CHECKSUM_BYTES = _CHECKSUM.size


class Kind(IntEnum):
    """What a frame says, as on the wire."""

    HELLO = 1
    PROOF = 2
    PUSH = 3
    PULL = 4
    RECEIPT = 5
    PULLED = 6
    PING = 7
    GOODBYE = 8


@dataclass(frozen=True, kw_only=True)
class Message:
    """Content of a frame, independent of the connection: a resend through another one carries identical bytes."""

    kind: Kind
    control: bytes  # the control record, encoded
    payload: Sequence[memoryview] = ()  # the bytes of the tensors one after the other, with padding between them
    tensors: int = 0  # how many the payload holds

    @cached_property
    def payload_bytes(self) -> int:
        return sum([each.nbytes for each in self.payload])

    @cached_property
    def frame_bytes(self) -> int:
        return frame_bytes(len(self.control), self.payload_bytes)

    def frame(self, epoch: int, sequence: int) -> Iterator[memoryview]:
        """Buffers to send in order, as the `sequence`-th frame of this direction of a connection.

        Lazy: each is read and summed when it is taken, and is to be sent soon after.
        """
        header = Header(
            self.kind,
            epoch,
            sequence,
            len(self.control),
            self.tensors,
            self.payload_bytes,
            zlib.crc32(self.control),
        )
        yield memoryview(header.pack() + self.control)
        if self.payload_bytes:
            checksum = 0
            for chunk in _chunks(self.payload):
                checksum = crc32(chunk, checksum)
                yield chunk
            yield memoryview(_CHECKSUM.pack(checksum))


def frame_bytes(control_bytes: int, payload_bytes: int) -> int:
    """Size of a frame on the wire."""
    return HEADER_BYTES + control_bytes + payload_bytes + (CHECKSUM_BYTES if payload_bytes else 0)


def check_payload(checksum: int, trailer: bytes | bytearray | memoryview) -> None:
    """Raise MalformedError where a payload's checksum is not the one in its `trailer`."""
    if checksum != _CHECKSUM.unpack(trailer)[0]:
        raise MalformedError(
            "The tensors of a frame do not match their checksum: bytes changed on their way, or while being sent."
        )


def _chunks(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        if buffer.nbytes <= CHUNK_BYTES:
            yield buffer
            continue
        for start in range(0, buffer.nbytes, CHUNK_BYTES):
            yield buffer[start : start + CHUNK_BYTES]


class Header(NamedTuple):
    """The fixed-size start of a frame."""

    kind: Kind
    epoch: int  # of the connection and direction, so that frames of another are refused
    sequence: int  # within the epoch, from 0
    control_bytes: int
    tensors: int
    payload_bytes: int
    control_checksum: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(MAGIC, PROTOCOL, self.kind, 0, *self[1:])
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Header:
        """Read HEADER_BYTES bytes. MalformedError: magic, kind, flags or checksum; MismatchError: another protocol."""
        magic, protocol, kind, flags, *numbers = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise MalformedError(
                f"What arrived begins with {bytes(magic)!r} instead of {MAGIC!r}, so it is no frame of Gossamer's. "
                "Another program answers at this address, or calls here: give each its own port."
            )
        if protocol != PROTOCOL:
            raise MismatchError(
                f"The other side speaks protocol {protocol} and this one {PROTOCOL}, so neither can read the other. "
                "Install the same version of Gossamer everywhere."
            )
        if zlib.crc32(memoryview(data)[: _FIELDS.size]) != _CHECKSUM.unpack_from(data, _FIELDS.size)[0]:
            raise MalformedError("A frame's header does not match its checksum: bytes changed on their way.")
        if flags or kind not in _KINDS:
            raise MalformedError(f"A frame of kind {kind} with flags {flags} is none that protocol {PROTOCOL} knows.")
        return cls(Kind(kind), *numbers)

    def check_lengths(self, limit_bytes: int) -> None:
        """Raise MalformedError for a frame larger than agreed, before anything is allocated for it."""
        if self.control_bytes + self.payload_bytes > limit_bytes:
            raise MalformedError(
                f"A frame announces {self.control_bytes} + {self.payload_bytes} bytes where {limit_bytes} are agreed "
                "on, so it is not read. If it is meant, write largest_frame_bytes=... for both ends."
            )

    def check_control(self, control: bytearray) -> None:
        if zlib.crc32(control) != self.control_checksum:
            raise MalformedError("A frame's control record does not match its checksum: bytes changed on their way.")


_KINDS = frozenset(Kind)
