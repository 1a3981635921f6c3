"""Headers: what is written is read, and nothing else is."""

from __future__ import annotations

import struct
import zlib

import pytest

from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES, FrameMac
from gossamer.comm.rpc_protocol.frames import (
    CHUNK_BYTES,
    HEADER_BYTES,
    PROTOCOL,
    TRAILER_BYTES,
    Header,
    Kind,
    Message,
    PayloadDigest,
)
from gossamer.errors import MalformedError, MismatchError

MAC = FrameMac(bytes(range(32)))
HEADER = Header(kind=Kind.PUSH, epoch=2**64 - 1, sequence=7, control_bytes=100, tensors=3, payload_bytes=2**63 - 1)


def tagged(fields: bytes | bytearray) -> bytes:
    return bytes(fields) + MAC.begin().add(fields)


def parsed(data: bytes | bytearray | memoryview) -> Header:
    return Header.parse(data, MAC.begin())


def test_a_header_has_the_form_that_was_written_down() -> None:
    fields = HEADER.pack()
    assert fields == struct.pack("<4sBBHQQIIQ", b"GSMR", PROTOCOL, 3, 0, 2**64 - 1, 7, 100, 3, 2**63 - 1)
    assert len(tagged(fields)) == HEADER_BYTES == 56
    assert parsed(tagged(fields)) == HEADER


def test_no_bit_of_a_header_can_flip() -> None:
    data = tagged(HEADER.pack())
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((MalformedError, MismatchError)):
            parsed(changed)


def test_an_unknown_kind_or_flag_is_malformed_though_its_tag_is_right() -> None:
    for change in ({5: 99}, {6: 1}):
        fields = bytearray(HEADER.pack())
        for place, value in change.items():
            fields[place] = value
        with pytest.raises(MalformedError, match="has no frame of kind"):
            parsed(tagged(fields))


def test_another_protocol_is_named_next_to_this_one() -> None:
    fields = bytearray(HEADER.pack())
    fields[4] = PROTOCOL + 1
    with pytest.raises(MismatchError, match=f"protocol {PROTOCOL + 1}, this process protocol {PROTOCOL}"):
        parsed(fields + bytes(TAG_BYTES))


def test_lengths_are_compared_with_the_limit() -> None:
    HEADER._replace(payload_bytes=900).check_lengths(1000)
    for control_bytes, payload_bytes in ((100, 901), (101, 900), (100, 2**63 - 1), (2**32 - 1, 0)):
        with pytest.raises(MalformedError, match="announces"):
            HEADER._replace(control_bytes=control_bytes, payload_bytes=payload_bytes).check_lengths(1000)


def trailer(header_and_control: bytes, payload: bytes, control_bytes: int) -> bytes:
    """Behind a payload, from what is before it."""
    tags, content = MAC.begin(), MAC.new_payload_hash()
    tags.add(header_and_control[: HEADER_BYTES - TAG_BYTES])
    tags.add(header_and_control[HEADER_BYTES : HEADER_BYTES + control_bytes])
    content.update(memoryview(payload))
    return zlib.crc32(payload).to_bytes(4, "little") + tags.add(content.digest())


def test_a_message_is_header_control_and_its_own_memory() -> None:
    memory = bytearray(b"12345678")
    message = Message(kind=Kind.PULLED, control=b"control", payload=[memoryview(memory)], tensors=1)
    start, payload, end = message.frame(MAC, 5, 6)
    header = parsed(start[:HEADER_BYTES])
    assert (header.epoch, header.sequence, header.control_bytes, header.tensors) == (5, 6, 7, 1)
    assert bytes(start[HEADER_BYTES:-TAG_BYTES]) == b"control"
    assert payload.obj is memory
    assert bytes(end) == trailer(bytes(start), b"12345678", 7)
    assert message.frame_bytes == HEADER_BYTES + 7 + TAG_BYTES + 8 + TRAILER_BYTES


def test_a_message_without_tensors_ends_with_its_control_record() -> None:
    message = Message(kind=Kind.PULL, control=b"control")
    (start,) = message.frame(MAC, 5, 6)
    assert message.frame_bytes == start.nbytes == HEADER_BYTES + 7 + TAG_BYTES


def test_a_long_payload_is_read_piece_by_piece_when_it_is_asked_for() -> None:
    memory = bytearray(2 * CHUNK_BYTES + 5)
    message = Message(kind=Kind.PUSH, control=b"", payload=[memoryview(memory), memoryview(b"end")], tensors=2)
    frame = message.frame(MAC, 0, 0)
    start = bytes(next(frame))
    sizes = [next(frame).nbytes]
    memory[-1] = 7  # had all been read before, the tag would not be that of what is sent
    *chunks, end = frame
    assert sizes + [chunk.nbytes for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 5, 3]
    assert bytes(end) == trailer(start, bytes(memory + b"end"), 0)


def test_another_trailer_is_malformed() -> None:
    content = PayloadDigest(MAC)
    content.update(memoryview(b"tensors"))
    end = content.trailer(MAC.begin())
    content.check(MAC.begin(), end)
    with pytest.raises(MalformedError, match="do not match their checksum"):
        content.check(MAC.begin(), b"\0" + end[1:])
    with pytest.raises(MalformedError, match="does not match its tag"):
        content.check(MAC.begin(), end[:-1] + bytes([end[-1] ^ 1]))
