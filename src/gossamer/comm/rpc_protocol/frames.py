"""Frame format: a header of fixed size, a control record, and the bytes of the tensors, each with a tag behind it.

    magic  protocol  kind  flags  epoch  sequence  control bytes  tensors  payload bytes  tag
    4 s    u8        u8    u16    u64    u64       u32            u32      u64            16 s

    control record  tag      the tensors' bytes  crc  tag
                    16 s                         u32  16 s

Little endian. A tag covers everything before it (frame_mac): a header is authenticated before its lengths are used, a
record before it is decoded, and tensors before they are returned. Every length is checked against a limit before memory
is allocated. The checksum and tag of a payload follow it, because both ends hash a long payload chunk by chunk while
other chunks are in transit. The CRC-32, which requires no key, distinguishes damage from forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from gossamer.base.kernels.checks import crc32
from gossamer.comm.handshake import MAGIC, PROTOCOL
from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES, FrameMac, FrameTags
from gossamer.errors import MalformedError, MismatchError

CHUNK_BYTES = 2**22  # of a payload, per hash update: smaller chunks have more overhead, larger ones more latency

_FIELDS = struct.Struct("<4sBBHQQIIQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + TAG_BYTES
TRAILER_BYTES = _CHECKSUM.size + TAG_BYTES


class Kind(IntEnum):
    """Kind of a frame, as on the wire."""

    PUSH = 3
    PULL = 4
    RECEIPT = 5
    PULLED = 6
    PING = 7
    GOODBYE = 8


@dataclass(frozen=True, kw_only=True)
class Message:
    """Content of a frame, independent of the connection: a resend over another connection has identical bytes."""

    kind: Kind
    control: bytes  # the encoded control record
    payload: Sequence[memoryview] = ()  # the concatenated bytes of the tensors, with padding between them
    tensors: int = 0  # number of tensors in the payload

    @cached_property
    def payload_bytes(self) -> int:
        return sum([each.nbytes for each in self.payload])

    @cached_property
    def frame_bytes(self) -> int:
        return frame_bytes(len(self.control), self.payload_bytes)

    def frame(self, mac: FrameMac, epoch: int, sequence: int) -> Iterator[memoryview]:
        """Yield the buffers of this message as the `sequence`-th frame of this direction of a connection, in order.

        Lazy: each buffer is read and hashed when it is yielded, and must be sent soon afterwards.
        """
        tags = mac.begin()
        header = Header(self.kind, epoch, sequence, len(self.control), self.tensors, self.payload_bytes).pack()
        yield memoryview(b"".join((header, tags.add(header), self.control, tags.add(self.control))))
        if self.payload_bytes:
            content = PayloadDigest(mac)
            for chunk in _chunks(self.payload):
                content.update(chunk)
                yield chunk
            yield memoryview(content.trailer(tags))


def frame_bytes(control_bytes: int, payload_bytes: int) -> int:
    """Return the size of a frame on the wire."""
    return HEADER_BYTES + control_bytes + TAG_BYTES + payload_bytes + (TRAILER_BYTES if payload_bytes else 0)


class PayloadDigest:
    """Checksum and hash of a payload, computed while it is in transit; the sender appends them."""

    def __init__(self, mac: FrameMac) -> None:
        self._checksum, self._hash = 0, mac.new_payload_hash()

    def update(self, data: memoryview) -> None:
        self._checksum = crc32(data, self._checksum)
        self._hash.update(data)

    def trailer(self, tags: FrameTags) -> bytes:
        return _CHECKSUM.pack(self._checksum) + tags.add(self._hash.digest())

    def check(self, tags: FrameTags, trailer: bytes | bytearray | memoryview) -> None:
        """Raise MalformedError if the trailer of a payload does not match."""
        if self._checksum != _CHECKSUM.unpack_from(trailer)[0]:
            raise MalformedError(
                "The tensors of a frame do not match their checksum: bytes changed in transit, or while being sent."
            )
        tags.check(self._hash.digest(), memoryview(trailer)[_CHECKSUM.size :], "payload")


def _chunks(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        if buffer.nbytes <= CHUNK_BYTES:
            yield buffer
            continue
        for start in range(0, buffer.nbytes, CHUNK_BYTES):
            yield buffer[start : start + CHUNK_BYTES]


class Header(NamedTuple):
    """The fixed-size beginning of a frame."""

    kind: Kind
    epoch: int  # of the connection and direction, so that frames of another one are rejected
    sequence: int  # within the epoch, from 0
    control_bytes: int
    tensors: int
    payload_bytes: int

    def pack(self) -> bytes:
        """Encode the header without its tag."""
        return _FIELDS.pack(MAGIC, PROTOCOL, self.kind, 0, *self[1:])

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, tags: FrameTags) -> Header:
        """Parse HEADER_BYTES bytes. MalformedError: magic, tag, kind or flags; MismatchError: another protocol."""
        magic, protocol, kind, flags, *numbers = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise MalformedError(
                f"The received data begins with {bytes(magic)!r} instead of {MAGIC!r}, so it is not a Gossamer frame. "
                "Another program uses this address: give each program its own port."
            )
        if protocol != PROTOCOL:
            raise MismatchError(
                f"The peer uses protocol {protocol}, this process protocol {PROTOCOL}. "
                "Install the same version of Gossamer everywhere."
            )
        tags.check(memoryview(data)[: _FIELDS.size], memoryview(data)[_FIELDS.size :], "header")
        if flags or kind not in _KINDS:
            raise MalformedError(f"Protocol {PROTOCOL} has no frame of kind {kind} with flags {flags}.")
        return cls(Kind(kind), *numbers)

    def check_lengths(self, limit_bytes: int) -> None:
        """Raise MalformedError for a frame above the limit, before any memory is allocated."""
        if self.control_bytes + self.payload_bytes > limit_bytes:
            raise MalformedError(
                f"A frame announces {self.control_bytes} + {self.payload_bytes} bytes; the agreed limit is "
                f"{limit_bytes}, so it is not read. To allow it, set largest_frame_bytes=... at both ends."
            )


_KINDS = frozenset(Kind)
