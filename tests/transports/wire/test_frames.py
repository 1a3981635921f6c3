"""Headers: what is written is read, and nothing else is."""

from __future__ import annotations

import struct
import zlib

import pytest

from gossamer.errors import MalformedError, MismatchError
from gossamer.transports.wire.frames import (
    CHECKSUM_BYTES,
    CHUNK_BYTES,
    HEADER_BYTES,
    PROTOCOL,
    Header,
    Kind,
    Message,
    check_payload,
)

HEADER = Header(
    kind=Kind.PUSH,
    epoch=2**64 - 1,
    sequence=7,
    control_bytes=100,
    tensors=3,
    payload_bytes=2**63 - 1,
    control_checksum=12,
)


def test_a_header_has_the_form_that_was_written_down() -> None:
    data = HEADER.pack()
    fields = struct.pack("<4sBBHQQIIQI", b"GSMR", 1, 3, 0, 2**64 - 1, 7, 100, 3, 2**63 - 1, 12)
    assert data == fields + zlib.crc32(fields).to_bytes(4, "little")
    assert len(data) == HEADER_BYTES == 48
    assert Header.parse(data) == HEADER


def test_no_bit_of_a_header_can_flip() -> None:
    data = HEADER.pack()
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((MalformedError, MismatchError)):
            Header.parse(changed)


def test_an_unknown_kind_or_flag_is_malformed_though_its_checksum_is_right() -> None:
    for change in ({5: 99}, {6: 1}):
        fields = bytearray(HEADER.pack()[:-4])
        for place, value in change.items():
            fields[place] = value
        with pytest.raises(MalformedError, match="is none that protocol"):
            Header.parse(fields + zlib.crc32(fields).to_bytes(4, "little"))


def test_another_protocol_is_named_beside_this_one() -> None:
    fields = bytearray(HEADER.pack())
    fields[4] = PROTOCOL + 1
    with pytest.raises(MismatchError, match=f"protocol {PROTOCOL + 1} and this one {PROTOCOL}"):
        Header.parse(fields)


def test_lengths_are_compared_with_the_limit() -> None:
    HEADER._replace(payload_bytes=900).check_lengths(1000)
    for control_bytes, payload_bytes in ((100, 901), (101, 900), (100, 2**63 - 1), (2**32 - 1, 0)):
        with pytest.raises(MalformedError, match="announces"):
            HEADER._replace(control_bytes=control_bytes, payload_bytes=payload_bytes).check_lengths(1000)


def test_a_message_is_header_control_and_its_own_memory() -> None:
    memory = bytearray(b"12345678")
    message = Message(kind=Kind.PULLED, control=b"control", payload=[memoryview(memory)], tensors=1)
    start, payload, checksum = message.frame(5, 6)
    header = Header.parse(start)
    assert (header.epoch, header.sequence, header.control_bytes, header.tensors) == (5, 6, 7, 1)
    assert bytes(start[HEADER_BYTES:]) == b"control"
    assert payload.obj is memory
    assert bytes(checksum) == zlib.crc32(memory).to_bytes(4, "little")
    assert message.frame_bytes == HEADER_BYTES + 7 + 8 + CHECKSUM_BYTES


def test_a_message_without_tensors_has_no_checksum_of_them() -> None:
    message = Message(kind=Kind.PULL, control=b"control")
    (start,) = message.frame(5, 6)
    assert message.frame_bytes == start.nbytes == HEADER_BYTES + 7


def test_a_long_payload_is_read_piece_by_piece_when_it_is_asked_for() -> None:
    memory = bytearray(2 * CHUNK_BYTES + 5)
    frame = Message(kind=Kind.PUSH, control=b"", payload=[memoryview(memory), memoryview(b"end")], tensors=2).frame(
        0, 0
    )
    sizes = [next(frame).nbytes for _ in range(2)]
    memory[-1] = 7  # had all been read before, the checksum would not be that of what is sent
    *chunks, checksum = frame
    assert sizes + [chunk.nbytes for chunk in chunks] == [HEADER_BYTES, CHUNK_BYTES, CHUNK_BYTES, 5, 3]
    assert bytes(checksum) == zlib.crc32(memory + b"end").to_bytes(4, "little")


def test_another_checksum_is_malformed() -> None:
    check_payload(258, b"\x02\x01\x00\x00")
    with pytest.raises(MalformedError, match="do not match their checksum"):
        check_payload(259, b"\x02\x01\x00\x00")
