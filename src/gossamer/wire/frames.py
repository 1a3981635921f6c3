"""Frames: a header of fixed size, a control record, and the bytes of tensors.

    magic  protocol  kind  flags  epoch  sequence  control bytes  tensors  payload bytes  control crc  header crc
    4 s    u8        u8    u16    u64    u64       u32            u32      u64            u32          u32

Little endian. The header's checksum covers the control's, and the control holds one of each tensor, so that no bit of
a frame can flip unnoticed. Every length is compared with a limit before memory is allocated for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from gossamer.errors import MalformedError, MismatchError

MAGIC = b"GSMR"
PROTOCOL = 1
STRANGERS_LIMIT = 2**16  # bytes of a frame from somebody who has not shown the token

_FIELDS = struct.Struct("<4sBBHQQIIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Kind(IntEnum):
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
    """What a frame carries, whichever connection it goes through and however often.

    payload: buffers of bytes, one after the other; `tensors` of them stand for something, the rest is padding.
    """

    kind: Kind
    control: bytes
    payload: Sequence[memoryview] = ()
    tensors: int = 0

    @property
    def payload_bytes(self) -> int:
        return sum(each.nbytes for each in self.payload)

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + len(self.control) + self.payload_bytes

    def frame(self, epoch: int, sequence: int) -> list[memoryview]:
        """The buffers to send, one after the other, as the `sequence`-th of this direction of a connection."""
        header = Header(
            kind=self.kind,
            epoch=epoch,
            sequence=sequence,
            control_bytes=len(self.control),
            tensors=self.tensors,
            payload_bytes=self.payload_bytes,
            control_checksum=zlib.crc32(self.control),
        )
        return [memoryview(header.pack() + self.control), *self.payload]


class Header(NamedTuple):
    kind: Kind
    epoch: int
    sequence: int
    control_bytes: int
    tensors: int
    payload_bytes: int
    control_checksum: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(MAGIC, PROTOCOL, self.kind, 0, *self[1:])
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Header:
        """Read HEADER_BYTES bytes. Other magic, kinds, flags, checksums: malformed. Another protocol: mismatch."""
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
        """Refuse what is larger than agreed, before anything is allocated for it."""
        if self.control_bytes + self.payload_bytes > limit_bytes:
            raise MalformedError(
                f"A frame announces {self.control_bytes} + {self.payload_bytes} bytes where {limit_bytes} are agreed "
                "on, so it is not read. If it is meant, write largest_frame_bytes=... for both ends."
            )

    def check_control(self, control: bytearray) -> None:
        if zlib.crc32(control) != self.control_checksum:
            raise MalformedError("A frame's control record does not match its checksum: bytes changed on their way.")


_KINDS = frozenset(Kind)
