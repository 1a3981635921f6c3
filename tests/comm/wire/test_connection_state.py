"""A connection's state fed with bytes: whole, in pieces, changed, from elsewhere."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
import torch
from support import wire_fuzz as fuzz
from support.wire_pairs import LIMIT, SERVED, authenticated_pair, feed

from gossamer.base.peer_ops import Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.wire.connection_state import STAGING_BYTES, ConnectionState
from gossamer.comm.wire.frame_mac import FrameTags
from gossamer.comm.wire.frames import HEADER_BYTES, TRAILER_BYTES, Header, Kind, Message, PayloadDigest
from gossamer.comm.wire.messages import (
    GOODBYE,
    PING,
    PulledRecord,
    PullRecord,
    PushRecord,
    ReceiptRecord,
    decode_record,
    encode_answer,
    encode_ask,
)
from gossamer.errors import MalformedError

PAYLOAD = (torch.arange(6.0).view(2, 3), torch.tensor([], dtype=torch.int8), torch.tensor(True))


def bytes_of(state: ConnectionState, *messages: Message) -> bytes:
    return b"".join(part for message in messages for part in state.send(message))


def test_a_push_and_its_receipt_come_as_they_were_said() -> None:
    dialer, listener = authenticated_pair()
    op = Push(to=SERVED, key="w", stamp=Stamp(3, 9, 2), payload=PAYLOAD, about="{}", within_seconds=4.0)
    (heard,) = feed(listener, bytes_of(dialer, encode_ask(op, 77)))
    assert isinstance(heard.record, PushRecord)
    again = heard.record.op(SERVED, heard.payload)
    assert (again.to, again.key, again.stamp, again.about) == (op.to, op.key, op.stamp, op.about)
    assert heard.record.request == 77
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(PAYLOAD, again.payload, strict=True))
    receipt = Receipt(version=5, payload=PAYLOAD[:1], about="late")
    (back,) = feed(dialer, bytes_of(listener, encode_answer(receipt, 77)))
    assert isinstance(back.record, ReceiptRecord)
    assert back.record.request == 77
    answer = back.record.answer(back.payload)
    assert (answer.version, answer.about) == (5, "late")
    assert torch.equal(answer.payload[0], PAYLOAD[0])


def test_a_pull_and_what_was_pulled_come_as_they_were_said() -> None:
    dialer, listener = authenticated_pair()
    op = Pull(of=SERVED, key="w", known=-1, at_least=12)
    (heard,) = feed(listener, bytes_of(dialer, encode_ask(op, 0)))
    assert isinstance(heard.record, PullRecord)
    assert heard.record.op(SERVED, ()) == op
    (back,) = feed(dialer, bytes_of(listener, encode_answer(Pulled(version=13, payload=PAYLOAD, about="x"), 0)))
    assert isinstance(back.record, PulledRecord)
    answer = back.record.answer(back.payload)
    assert (answer.version, answer.about, len(answer.payload)) == (13, "x", 3)


def test_bytes_may_come_one_by_one_or_all_at_once() -> None:
    dialer, listener = authenticated_pair()
    said = [encode_ask(Push(to=SERVED, key="w", stamp=Stamp(0, 0), payload=PAYLOAD), 1), PING, GOODBYE]
    data = bytes_of(dialer, *said)
    slowly = [frame for place in range(len(data)) for frame in feed(listener, data[place : place + 1])]
    assert [each.kind for each in slowly] == [Kind.PUSH, Kind.PING, Kind.GOODBYE]
    assert [each.frame_bytes for each in slowly] == [message.frame_bytes for message in said]
    assert [each.kind for each in feed(listener, bytes_of(dialer, *said))] == [Kind.PUSH, Kind.PING, Kind.GOODBYE]


def test_long_tensors_are_received_into_their_own_memory() -> None:
    dialer, listener = authenticated_pair()
    numel = 2 * STAGING_BYTES
    data = bytes_of(dialer, encode_ask(Push(to=SERVED, key="w", stamp=Stamp(0, 0), payload=(torch.ones(numel),)), 1))
    start = len(data) - 4 * numel - TRAILER_BYTES
    feed(listener, data[:start])
    buffer = listener.receive_buffer()
    buffer[:] = data[start:-TRAILER_BYTES]
    assert list(listener.receive_data(buffer.nbytes)) == []
    (frame,) = feed(listener, data[-TRAILER_BYTES:])
    buffer[:4] = b"\0\0\0\0"
    assert frame.payload[0].tolist() == [0.0] + [1.0] * (numel - 1)


def test_what_came_before_something_malformed_is_heard() -> None:
    dialer, listener = authenticated_pair()
    data = bytes_of(dialer, PING) + bytes(HEADER_BYTES)
    listener.receive_buffer()[: len(data)] = data
    frames = listener.receive_data(len(data))
    heard = next(frames)
    assert heard is not None
    assert heard.kind is Kind.PING
    with pytest.raises(MalformedError, match="begins with"):
        next(frames)


# -- what is refused ---------------------------------------------------------------------------------


def refuses(listener: ConnectionState, data: bytes, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        feed(listener, data)


def test_no_bit_of_a_frame_can_flip() -> None:
    dialer, listener = authenticated_pair()
    data = bytes_of(dialer, encode_ask(Push(to=SERVED, key="w", stamp=Stamp(0, 0), payload=PAYLOAD), 1))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        listener._frames_received = 0
        listener._expect_frame()
        with pytest.raises(MalformedError):
            feed(listener, bytes(changed) + bytes(HEADER_BYTES))  # nor make it wait for more


def test_a_frame_twice_is_refused() -> None:
    dialer, listener = authenticated_pair()
    data = bytes_of(dialer, PING)
    feed(listener, data)
    refuses(listener, data, "number 0 of epoch .* expected number 1")


def test_frames_that_overtake_each_other_are_refused() -> None:
    dialer, listener = authenticated_pair()
    bytes_of(dialer, PING)
    refuses(listener, bytes_of(dialer, PING), "number 1 of epoch .* expected number 0")


@pytest.mark.parametrize(
    ("kind", "control"),
    [
        (Kind.PULL, b"\x80"),
        (Kind.PING, b"\x81\xa5extra\x01"),
        (Kind.PULL, b"\xc1"),
        (Kind.PULL, b""),
        (Kind.PULL, b"\x91" * 5000),
        (Kind.PING, b"\x81\xa7tensors\x91\x92\x63\x90"),
        (Kind.PING, b"\x81\xa7tensors\x91\x92\x08\x91\xff"),
        (Kind.PING, b"\x81\xa7tensors\x91\x93\x08\x90\x00"),
    ],
    ids=["missing", "unknown", "nonsense", "empty", "deep", "dtype", "negative", "more"],
)
def test_records_that_stand_for_nothing_are_refused(kind: Kind, control: bytes) -> None:
    with pytest.raises(MalformedError, match="control record"):
        decode_record(kind, control)


def test_as_many_tensors_are_described_as_announced() -> None:
    dialer, listener = authenticated_pair()
    message = Message(kind=Kind.PING, control=PING.control, tensors=1)
    refuses(listener, bytes_of(dialer, message), "announces 1 tensors but describes 0")


def test_another_protocol_in_the_middle_is_an_accident() -> None:
    dialer, listener = authenticated_pair()
    data = bytearray(bytes_of(dialer, PING))
    data[4] = 9
    refuses(listener, bytes(data), "another protocol")


def test_promise_7_no_memory_is_taken_for_a_length_that_was_not_agreed_on() -> None:
    for length in (LIMIT, 2**31, 2**40, 2**63 - 1):
        dialer, listener = authenticated_pair()
        assert dialer.authenticated is not None
        fields = Header(Kind.PING, dialer.authenticated.sending_epoch, 0, 1, 0, length).pack()
        tracemalloc.start()
        refuses(listener, fields + dialer.authenticated.sending_mac.begin().add(fields), "limit")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < LIMIT


def test_promise_7_20000_changed_streams_make_no_other_word() -> None:
    fuzz.fuzz(20_000)


def no_control_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    check = FrameTags.check

    def unless_record(tags: FrameTags, part: bytes, tag: bytes, what: str) -> None:
        if "record" in what:
            tags.add(part)
        else:
            check(tags, part, tag, what)

    monkeypatch.setattr(FrameTags, "check", unless_record)


def no_payload_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PayloadDigest, "check", lambda digest, tags, trailer: None)


@pytest.mark.parametrize("broken", [no_control_tag, no_payload_check], ids=lambda each: each.__name__)
def test_fewer_checks_are_found_out(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match="made another word"):
        fuzz.fuzz(5_000)


def test_without_numbers_a_frame_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectionState, "_parse", _parse_without_numbers)
    with pytest.raises(AssertionError, match="made another word"):
        fuzz.fuzz(100)


def _parse_without_numbers(state: ConnectionState, start: memoryview, tags: FrameTags) -> Header:
    header = Header.parse(start, tags)
    header.check_lengths(LIMIT)
    return header
