"""A connection's state fed with bytes: whole, in pieces, changed, from elsewhere."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import torch
from support import wire_fuzz as fuzz
from support.nightly import nightly
from support.wire_pairs import LIMIT, SERVED, authenticated_pair, feed

from gossamer.base.kernels import polyval
from gossamer.base.peer_ops import Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.rpc_protocol import connection_state
from gossamer.comm.rpc_protocol.connection_state import STAGING_BYTES, ConnectionState
from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES, FrameMac, FrameTags
from gossamer.comm.rpc_protocol.frames import HEADER_BYTES, TRAILER_BYTES, Header, Kind, Message, PayloadDigest
from gossamer.comm.rpc_protocol.messages import (
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


@pytest.mark.parametrize("streams", [5_000, *nightly(20_000)])
def test_promise_7_changed_streams_make_no_other_word(streams: int) -> None:
    fuzz.fuzz(streams)


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


# -- Somebody on the path who sees everything and holds no token: what is changed, repeated or moved is refused
TENS = torch.full((10,), 1000.0)
PAYLOAD_BYTES = TENS.nbytes
NO_KEY = FrameMac(b"")


@pytest.fixture(params=["polyval", "blake2b"])
def payload_hash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blake2b":
        monkeypatch.setattr(polyval, "available", lambda: False)
    elif not polyval.available():
        pytest.skip("no kernels were compiled here")


def push(state: ConnectionState, step: int = 0) -> bytes:
    op = Push(to=SERVED, key="w", stamp=Stamp(3, step), payload=(torch.full((10,), 1.0 + step),))
    return b"".join(state.send(encode_ask(op, step)))


def with_payload(data: bytes, payload: torch.Tensor) -> bytes:
    """The frame with another payload of the same size, whose checksum is made right."""
    forged = payload.numpy().tobytes()
    start = len(data) - TRAILER_BYTES - len(forged)
    return data[:start] + forged + zlib.crc32(forged).to_bytes(4, "little") + data[-TAG_BYTES:]


def refused(listener: ConnectionState, data: bytes, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        feed(listener, data)


@pytest.mark.usefixtures("payload_hash")
def test_a_payload_that_was_changed_with_its_checksum_is_refused() -> None:
    dialer, listener = authenticated_pair()
    refused(listener, with_payload(push(dialer), TENS), "payload of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
def test_damage_is_told_from_forgery() -> None:
    dialer, listener = authenticated_pair()
    data = bytearray(push(dialer))
    data[-TRAILER_BYTES - 1] ^= 1
    refused(listener, bytes(data), "do not match their checksum")


def changed_record(data: bytes) -> bytes:
    return data.replace(b"\xa1w", b"\xa1v", 1)


def changed_length(data: bytes) -> bytes:
    return data[:32] + struct.pack("<Q", 48) + data[40:]


def changed_number(data: bytes) -> bytes:
    return data[:16] + struct.pack("<Q", 1) + data[24:]


@pytest.mark.usefixtures("payload_hash")
@pytest.mark.parametrize("change", [changed_record, changed_length, changed_number], ids=lambda each: each.__name__)
def test_nothing_else_of_a_frame_can_be_changed(change: Callable[[bytes], bytes]) -> None:
    dialer, listener = authenticated_pair()
    data = push(dialer)
    assert change(data) != data
    refused(listener, change(data), "of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
def test_a_tag_without_the_key_is_no_tag() -> None:
    """The whole frame is forged, without the key."""
    dialer, listener = authenticated_pair()
    push_ = encode_ask(Push(to=SERVED, key="w", stamp=Stamp(3, 0), payload=(TENS,)), 0)
    assert dialer.authenticated is not None
    forged = b"".join(push_.frame(NO_KEY, dialer.authenticated.sending_epoch, 0))
    refused(listener, forged, "header of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
def test_parts_of_two_frames_do_not_fit_together() -> None:
    """Each part is genuine: the header of the second push with the payload of the first."""
    dialer, listener = authenticated_pair()
    first, second = push(dialer, 0), push(dialer, 1)
    assert len(first) == len(second)
    end = PAYLOAD_BYTES + TRAILER_BYTES
    feed(listener, first)
    refused(listener, second[:-end] + first[-end:], "payload of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
@pytest.mark.parametrize(
    "order", [(0, 0), (1, 0), (0, 2), (1,)], ids=["replayed", "reordered", "one left out", "the first left out"]
)
def test_promise_15_frames_come_once_in_order_and_all(order: tuple[int, ...]) -> None:
    dialer, listener = authenticated_pair()
    said = [push(dialer, step) for step in range(3)]
    with pytest.raises(MalformedError, match=r"number \d of epoch .* expected number \d"):
        feed(listener, b"".join(said[each] for each in order))


@pytest.mark.usefixtures("payload_hash")
def test_a_number_in_the_header_cannot_be_made_right_for_a_replay() -> None:
    dialer, listener = authenticated_pair()
    data = push(dialer)
    feed(listener, data)
    refused(listener, changed_number(data), "header of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
def test_what_is_cut_short_is_never_heard() -> None:
    dialer, listener = authenticated_pair()
    data, following = push(dialer), b"".join(dialer.send(PING))
    assert feed(listener, data[:-1]) == []
    refused(listener, following, "does not match")


@pytest.mark.usefixtures("payload_hash")
def test_frames_of_another_connection_are_refused() -> None:
    (dialer, _), (_, listener) = authenticated_pair(), authenticated_pair()
    refused(listener, push(dialer), "header of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
def test_frames_of_another_connection_are_refused_though_their_epoch_is_made_right() -> None:
    (dialer, _), (_, listener) = authenticated_pair(), authenticated_pair()
    assert listener.authenticated is not None
    data = push(dialer)
    moved = data[:8] + struct.pack("<Q", listener.authenticated.receiving_epoch) + data[16:]
    refused(listener, moved, "header of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
def test_promise_15_frames_that_are_reflected_are_refused() -> None:
    dialer, _ = authenticated_pair()
    refused(dialer, push(dialer), "header of a frame does not match its tag")


@pytest.mark.usefixtures("payload_hash")
def test_every_connection_and_direction_has_a_key_of_its_own() -> None:
    tags = set()
    for _ in range(2):
        dialer, listener = authenticated_pair()
        assert dialer.authenticated is not None
        assert listener.authenticated is not None
        for mine, theirs in (
            (dialer.authenticated.sending_mac, listener.authenticated.receiving_mac),
            (dialer.authenticated.receiving_mac, listener.authenticated.sending_mac),
        ):
            assert mine.begin().add(b"x") == theirs.begin().add(b"x")
            hashes = mine.new_payload_hash(), theirs.new_payload_hash()
            for each in hashes:
                each.update(memoryview(b"x"))
            assert hashes[0].digest() == hashes[1].digest()
            tags |= {mine.begin().add(b"x"), hashes[0].digest()}
    assert len(tags) == 8


@pytest.mark.usefixtures("payload_hash")
def test_nothing_is_decoded_before_it_is_authentic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory is taken for a forged length, nor a forged record parsed, nor forged tensors seen."""

    def never(*_: object) -> None:
        pytest.fail("something forged was used")

    for change, decoder in ((changed_length, "allocate"), (changed_record, "decode_record")):
        dialer, listener = authenticated_pair()
        with monkeypatch.context() as patch:
            patch.setattr(connection_state, decoder, never)
            refused(listener, change(push(dialer)), "does not match its tag")
    dialer, listener = authenticated_pair()
    monkeypatch.setattr(connection_state, "decode_tensors", never)
    refused(listener, with_payload(push(dialer), TENS), "does not match its tag")


# -- an attacker that tries many things, and ends that check less ---------------------------------------


def attack(count: int) -> None:
    """Genuine frames of two connections and both directions, cut at their parts and put together at random."""
    draw = random.Random(7)
    pairs = [authenticated_pair() for _ in range(2)]
    genuine = [[push(each, step) for step in range(4)] for pair in pairs for each in pair]
    _, listener = pairs[0]
    for _ in range(count):
        data = bytearray()
        for step in range(3):
            source, number = draw.choice([0, 0, 0, 1, 2]), draw.choice([step, step, draw.randrange(4)])
            frame = bytearray(genuine[source][number])
            other = genuine[draw.randrange(4)][draw.randrange(4)]
            payload = len(frame) - PAYLOAD_BYTES - TRAILER_BYTES
            begin = draw.choice([0, HEADER_BYTES - TAG_BYTES, HEADER_BYTES, payload, len(frame) - TRAILER_BYTES])
            end = draw.choice([begin, begin, begin + TAG_BYTES, len(frame)])
            frame[begin:end] = other[begin:end]
            data += with_payload(bytes(frame), TENS) if draw.random() < 0.2 else frame
        listener._frames_received = 0
        listener._expect_frame()
        heard, sound = 0, b"".join(genuine[0])
        left = bytes(data)
        try:
            while left:
                heard += len(feed(listener, left[: len(genuine[0][0])]))
                left = left[len(genuine[0][0]) :]
        except MalformedError:
            pass
        accepted = heard * len(genuine[0][0])
        assert data[:accepted] == sound[:accepted], "a forged frame was taken"


@pytest.mark.usefixtures("payload_hash")
def test_2000_patched_streams_pass_only_where_nothing_was_patched() -> None:
    attack(2000)


def unchecked_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameTags, "check", lambda tags, part, tag, what: tags.add(part))


def header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check = FrameTags.check

    def unless_later(tags: FrameTags, part: bytes, tag: bytes, what: str) -> None:
        if what == "header":
            check(tags, part, tag, what)

    monkeypatch.setattr(FrameTags, "check", unless_later)


def payload_without_header(monkeypatch: pytest.MonkeyPatch) -> None:
    trailer, check = PayloadDigest.trailer, PayloadDigest.check
    monkeypatch.setattr(PayloadDigest, "trailer", lambda digest, tags: trailer(digest, NO_KEY.begin()))
    monkeypatch.setattr(PayloadDigest, "check", lambda digest, tags, said: check(digest, NO_KEY.begin(), said))


@pytest.mark.usefixtures("payload_hash")
@pytest.mark.parametrize(
    "broken", [unchecked_tags, header_alone, payload_without_header], ids=lambda each: each.__name__
)
def test_less_is_found_out(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match="a forged frame was taken"):
        attack(2000)
