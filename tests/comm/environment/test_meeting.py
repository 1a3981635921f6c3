"""The protocol of the meeting, without sockets: who is taken, who is refused, and who hears of whom."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gossamer.comm.environment.meeting import (
    COMING,
    HEADER,
    MAGIC,
    PURPOSE,
    STANDING,
    Guest,
    Hello,
    Inbox,
    Meeting,
    RunIdentity,
    pack,
    read_refusal,
)
from gossamer.comm.handshake import Dialer
from gossamer.errors import MalformedError

OURS = RunIdentity(run="a run", world=2, token=bytes(range(32)))
Told = list[tuple[str, str]]


def hello(rank: int, **changes: object) -> Hello:
    return replace(Hello(run="a run", world=2, rank=rank, who=f"host, process {rank}"), **changes)  # type: ignore[arg-type]


def claims(guest: Guest, text: str, identity: RunIdentity = OURS, purpose: bytes = PURPOSE) -> Dialer:
    """A rank's end of the handshake, whose claims have reached the meeting's end."""
    dialer = Dialer(purpose, identity.token, text.encode())
    dialer.receive(guest.handshake.output())
    hello = dialer.output()
    while hello and guest.handshake.wanted_bytes:
        hello = hello[guest.handshake.receive(hello) :]
    return dialer


def answered(dialer: Dialer, answer: bytes) -> Dialer:
    assert dialer.receive(answer) == len(answer)
    return dialer


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def meeting(told: Told) -> Meeting:
    return Meeting(OURS, lambda kind, sentence: told.append((kind, sentence)))


def comes(meeting: Meeting, rank: int) -> Guest:
    guest = Guest()
    claims(guest, hello(rank).text())
    meeting.admit(guest)
    assert guest.hello is not None
    return guest


def test_both_ends_prove_the_token_and_all_hear_all(meeting: Meeting, told: Told) -> None:
    first, second, said = Guest(), Guest(), hello(0).text()
    dialer = claims(first, said)
    ((_, answer),) = meeting.admit(first)
    assert answered(dialer, answer).accepted == b""
    claims(second, hello(1).text())
    _, *heard = meeting.admit(second)
    texts = pack({"heard": COMING, "texts": [said, hello(1).text()]})
    assert heard == [(guest, texts) for guest in (first, second)]
    assert not told


@pytest.mark.parametrize(
    ("said", "identity", "purpose", "why"),
    [
        (hello(1), replace(OURS, token=b""), PURPOSE, "cannot prove"),
        (hello(1), OURS, b"mesh", "cannot prove"),
        (
            hello(1, run="older"),
            replace(OURS, token=b""),
            PURPOSE,
            "the run 'older' and this is the run 'a run'",
        ),
        (hello(1, world=3), OURS, PURPOSE, "WORLD_SIZE=3, rank 0 with 2"),
        (hello(2), OURS, PURPOSE, "its rank is 2 of 2"),
        (hello(-1), OURS, PURPOSE, "its rank is -1 of 2"),
        (hello(0), OURS, PURPOSE, "another worker (host, process 0) is already present as rank 0"),
    ],
)
def test_a_peer_that_does_not_belong_is_refused_and_told_of_at_both_ends(
    meeting: Meeting, told: Told, said: Hello, identity: RunIdentity, purpose: bytes, why: str
) -> None:
    first, stranger = comes(meeting, 0), Guest()
    dialer = claims(stranger, said.text(), identity, purpose)
    ((whom, answer),) = meeting.admit(stranger)
    assert whom is stranger
    assert stranger.dismissed
    assert stranger.hello is None
    reason, taken = read_refusal(answered(dialer, answer).refused or b"")
    assert why in reason
    assert why in told[0][1]
    assert taken == ("already present" in reason)
    assert meeting.left(stranger) == []
    claims(real := Guest(), hello(1).text())
    assert [whom for whom, _ in meeting.admit(real)] == [real, first, real]


def refusal_of_rank_1(meeting: Meeting) -> str:
    """Why another one that says it is rank 1 is refused."""
    dialer = claims(late := Guest(), hello(1).text())
    ((_, answer),) = meeting.admit(late)
    return read_refusal(answered(dialer, answer).refused or b"")[0]


def test_a_peer_that_leaves_is_named_to_all_others_until_the_group_stands_for_all(meeting: Meeting) -> None:
    first, second = comes(meeting, 0), comes(meeting, 1)
    meeting.take(first, {"topic": STANDING, "text": ""})
    failed = {"failed": "rank 1 (host, process 1) left while the workers were joining", "cause": "left"}
    assert (first, pack(failed)) in meeting.left(second)
    assert refusal_of_rank_1(meeting)


def test_a_peer_that_leaves_when_the_group_stands_is_told_of_and_ends_nothing(meeting: Meeting) -> None:
    first, second = comes(meeting, 0), comes(meeting, 1)
    meeting.take(first, {"topic": STANDING, "text": ""})
    meeting.take(second, {"topic": STANDING, "text": ""})
    assert (first, pack({"gone": "rank 1 (host, process 1)"})) in meeting.left(second)
    assert "is already present as rank 1" in refusal_of_rank_1(meeting)


def test_it_is_known_who_has_not_come(meeting: Meeting) -> None:
    assert meeting.missing(COMING) == [0, 1]
    first = comes(meeting, 1)
    assert meeting.missing(COMING) == [0]
    meeting.take(first, {"topic": STANDING, "text": ""})
    comes(meeting, 0)
    assert (meeting.missing(COMING), meeting.missing(STANDING)) == ([], [0])


def test_a_peer_that_waits_no_longer_ends_the_meeting_for_all(meeting: Meeting) -> None:
    first = comes(meeting, 0)
    replies = meeting.take(first, {"topic": COMING, "seconds": 300})
    assert replies == [(first, pack({"failed": "rank 1 of 2 did not join within 0.3 s", "cause": "few"}))]


BAD = [
    b"GET / HTTP/1.1\r\n",
    b"G",
    b"SSH",
    HEADER.pack(MAGIC, 5000),
    HEADER.pack(MAGIC, 2**32 - 1),
    HEADER.pack(MAGIC, 3) + b"[]]",
    HEADER.pack(MAGIC, 2) + b"[]",
    HEADER.pack(MAGIC, 4) + b"\xff\xfe\xff\xfe",
    HEADER.pack(MAGIC, 4000) + b"[" * 4000,
]


@pytest.mark.parametrize("sent", [each for each in BAD if each != b"G"])
def test_bytes_that_are_no_message_are_a_typed_error_before_memory_is_taken(sent: bytes) -> None:
    with pytest.raises(MalformedError):
        Inbox(4096).feed(sent)


@pytest.mark.parametrize("said", [b"", b"\xff\xfe", b"[]", b"{}", b"[" * 4000])
def test_claims_that_are_no_hello_are_a_typed_error(meeting: Meeting, said: bytes) -> None:
    dialer = Dialer(PURPOSE, OURS.token, said)
    dialer.receive((guest := Guest()).handshake.output())
    guest.handshake.receive(dialer.output())
    with pytest.raises(MalformedError):
        meeting.admit(guest)
    assert guest.hello is None


def test_messages_come_in_any_pieces() -> None:
    stream, inbox = pack({"a": 1}) + pack({"b": "ö"}), Inbox(4096)
    found = [message for at in range(len(stream)) for message in inbox.feed(stream[at : at + 1])]
    assert found == [{"a": 1}, {"b": "ö"}]


def changed(message: dict[str, object], draw: random.Random) -> Iterator[dict[str, object]]:
    values: list[object] = [None, True, -1, 2**40, 10**400, 0.5, "", "\ud800", "x" * 500, "a\x1b[2J", [], {}, [[]]]
    for key in message:
        yield {**message, key: draw.choice(values)}
        yield {name: value for name, value in message.items() if name != key}


def test_nonsense_from_strangers_and_members_is_refused_or_a_typed_error(meeting: Meeting) -> None:
    draw = random.Random(1)
    member = comes(meeting, 0)
    fields = vars(hello(1))
    for _ in range(200):
        for nonsense in changed(fields, draw):
            guest = Guest()
            dialer = claims(guest, json.dumps(nonsense))
            try:
                replies = meeting.admit(guest)
            except MalformedError:
                continue
            if guest.hello is not None:  # a device or an address of another name is its own affair
                assert guest.hello.rank == 1
                meeting._members.pop(1)
                continue
            assert read_refusal(answered(dialer, replies[0][1]).refused or b"")
        for nonsense in changed({"topic": "reaching", "text": ""}, draw):
            try:
                meeting.take(member, nonsense)
            except MalformedError:
                continue
