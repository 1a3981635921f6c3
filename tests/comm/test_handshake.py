"""The one handshake: only two ends with the same key and purpose accept each other, whatever an attacker sends."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from gossamer.comm import handshake
from gossamer.comm.handshake import (
    DIALER,
    HEADER_BYTES,
    LISTENER,
    PROTOCOL,
    Dialer,
    Handshake,
    HandshakeStep,
    Listener,
    WrongKeyError,
    keyed_hash,
)
from gossamer.errors import ConnectError, MalformedError, MismatchError

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
PURPOSE = b"test"
CLAIMS, ANSWER = b"rank 1 of 2", b"rank 0 of 2"


def a_dialer(key: bytes = KEY, purpose: bytes = PURPOSE, claims: bytes = CLAIMS) -> Dialer:
    return Dialer(purpose, key, claims, limit_bytes=100)


def a_listener(purpose: bytes = PURPOSE) -> Listener:
    return Listener(purpose, limit_bytes=100)


def feed(end: Handshake, data: bytes) -> bytes:
    """Give all bytes that the end wants; the bytes that are not the handshake's."""
    while data and end.wanted_bytes:
        data = data[end.receive(data) :]
    return data


def message(step: int, body: bytes = b"", protocol: int = PROTOCOL, flags: int = 0, length: int | None = None) -> bytes:
    return handshake._HEADER.pack(b"GSMR", protocol, step, flags, len(body) if length is None else length) + body


def shake(dialer: Dialer, listener: Listener, key: bytes = KEY) -> tuple[bytes, bytes, bytes]:
    """Carry one handshake; the three messages."""
    feed(dialer, challenge := listener.output())
    feed(listener, hello := dialer.output())
    listener.accept(key, ANSWER)
    feed(dialer, answer := listener.output())
    return challenge, hello, answer


def test_two_ends_with_one_key_receive_each_others_claims_and_derive_the_same_keys() -> None:
    dialer, listener = a_dialer(), a_listener()
    sent = shake(dialer, listener)
    assert (listener.claims, dialer.accepted, dialer.refused) == (CLAIMS, ANSWER, None)
    assert dialer.wanted_bytes == listener.wanted_bytes == 0
    keys = {side: dialer.derive_key(b"frames", side) for side in (DIALER, LISTENER)}
    assert keys == {side: listener.derive_key(b"frames", side) for side in (DIALER, LISTENER)}
    other = a_dialer()
    shake(other, a_listener())
    others = {other.derive_key(b"frames", DIALER), other.derive_key(b"epoch", DIALER)}
    assert len({*keys.values(), *others}) == 4  # another one for each direction, connection and purpose
    assert all(KEY not in each for each in sent)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_may_arrive_in_any_pieces_and_later_bytes_are_left(size: int) -> None:
    dialer, listener = a_dialer(), a_listener()

    def carry(source: Handshake, to: Handshake, then: bytes = b"") -> bytes:
        data, left = source.output() + then, b""
        for at in range(0, len(data), size):
            left += feed(to, data[at : at + size])
        return left

    carry(listener, dialer)
    assert carry(dialer, listener, b"next") == b"next"
    listener.accept(KEY)
    assert carry(listener, dialer, b"more") == b"more"
    assert dialer.accepted == b""


def test_an_end_never_asks_for_bytes_beyond_its_message() -> None:
    dialer, listener = a_dialer(), a_listener()
    data, read = listener.output(), 0
    while read < len(data):
        wanted = dialer.wanted_bytes
        assert 0 < wanted <= len(data) - read
        dialer.receive(data[read : read + wanted])
        read += wanted


def test_the_listener_proves_nothing_to_a_dialer_with_another_key() -> None:
    dialer, listener = a_dialer(OTHER_KEY), a_listener()
    feed(dialer, listener.output())
    feed(listener, dialer.output())
    with pytest.raises(WrongKeyError) as wrong:
        listener.accept(KEY, ANSWER)
    assert wrong.value.claims == CLAIMS
    assert isinstance(wrong.value, ConnectError)
    assert listener.output() == b""


def test_the_dialer_does_not_accept_a_listener_with_another_key() -> None:
    """One that accepts anybody."""
    dialer, listener = a_dialer(), a_listener()
    feed(dialer, listener.output())
    feed(listener, dialer.output())
    proof = listener._proof(LISTENER, CLAIMS, ANSWER)  # by an empty key
    with pytest.raises(WrongKeyError) as wrong:
        feed(dialer, message(HandshakeStep.ACCEPT, proof + ANSWER))
    assert dialer.accepted is None
    assert wrong.value.claims == ANSWER


def test_a_refusal_has_claims_and_no_proof() -> None:
    dialer, listener = a_dialer(), a_listener()
    feed(dialer, listener.output())
    feed(listener, dialer.output())
    listener.refuse(b"the place is taken")
    refusal = listener.output()
    feed(dialer, refusal)
    assert (dialer.accepted, dialer.refused) == (None, b"the place is taken")
    assert refusal[HEADER_BYTES:] == b"the place is taken"
    assert dialer.wanted_bytes == 0


def test_the_key_may_be_chosen_by_the_claims_later() -> None:
    dialer, listener = a_dialer(), a_listener()
    feed(dialer, listener.output())
    feed(listener, dialer.output())
    assert not listener.is_proven(OTHER_KEY)
    assert listener.is_proven(KEY)
    listener.accept(KEY)
    feed(dialer, listener.output())
    assert dialer.accepted == b""


def test_promise_15_a_replayed_dialer_is_refused() -> None:
    _, hello, _ = shake(a_dialer(), a_listener())
    again = a_listener()
    feed(again, hello)
    with pytest.raises(WrongKeyError):
        again.accept(KEY)


def test_promise_15_a_replayed_listener_is_refused() -> None:
    challenge, _, answer = shake(a_dialer(), a_listener())
    again = a_dialer()
    feed(again, challenge)
    with pytest.raises(WrongKeyError):
        feed(again, answer)


@pytest.mark.parametrize(
    "replay", [test_promise_15_a_replayed_dialer_is_refused, test_promise_15_a_replayed_listener_is_refused]
)
def test_negative_control_without_fresh_nonces_a_replay_is_accepted(
    replay: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake.secrets, "token_bytes", lambda size: bytes(size))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        replay()


def test_a_reflected_message_is_refused() -> None:
    dialer, listener = a_dialer(), a_listener()
    challenge = listener.output()
    with pytest.raises(MalformedError, match="expected HELLO"):
        feed(listener, challenge)
    feed(dialer, challenge)
    with pytest.raises(MalformedError, match="expected ACCEPT or REFUSE"):
        feed(dialer, dialer.output())


def reflected_proof() -> None:
    """An attacker without the key gives the dialer's own proof back as the listener's."""
    dialer = a_dialer(claims=b"")
    feed(dialer, a_listener().output())
    hello = dialer.output()
    proof = hello[HEADER_BYTES + 32 : HEADER_BYTES + 64]
    with pytest.raises(WrongKeyError):
        feed(dialer, message(HandshakeStep.ACCEPT, proof))


def test_a_proof_of_one_side_proves_nothing_of_the_other() -> None:
    reflected_proof()


def test_negative_control_without_sides_and_claims_a_reflected_proof_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Handshake, "_proof", lambda end, side, *claims: end._hash(b"proof", b""))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        reflected_proof()


def test_a_man_in_the_middle_cannot_use_one_listeners_proof_at_another_dialer() -> None:
    first, second, listener = a_dialer(), a_dialer(), a_listener()
    challenge = listener.output()
    feed(first, challenge)
    feed(second, challenge)
    feed(listener, first.output())
    listener.accept(KEY)
    with pytest.raises(WrongKeyError):
        feed(second, listener.output())


def test_a_proof_for_one_purpose_proves_nothing_for_another() -> None:
    dialer, listener = a_dialer(purpose=b"mesh"), a_listener(purpose=b"peers")
    feed(dialer, listener.output())
    feed(listener, dialer.output())
    assert not listener.is_proven(KEY)


def test_no_bit_of_a_handshake_can_be_changed() -> None:
    draw = random.Random(7)
    for _ in range(4):
        challenge, hello, answer = shake(a_dialer(), a_listener())
        for which, original in enumerate((challenge, hello, answer)):
            for place in range(len(original)):
                changed = bytearray(original)
                changed[place] ^= 1 << draw.randrange(8)
                dialer, listener = a_dialer(), a_listener()
                said = [bytes(changed) if which == step else None for step in range(3)]
                try:
                    own = listener.output()
                    feed(dialer, _like(own, said[0], challenge))
                    own = dialer.output()
                    feed(listener, _like(own, said[1], hello))
                    listener.accept(KEY, ANSWER)
                    own = listener.output()
                    feed(dialer, _like(own, said[2], answer))
                except (MalformedError, MismatchError, WrongKeyError):
                    continue
                assert dialer.accepted is None  # a length that grew: it waits for more
                assert dialer.refused is None


def _like(own: bytes, changed: bytes | None, original: bytes) -> bytes:
    """What is sent in this handshake, with the same change as in the recorded one."""
    if changed is None:
        return own
    return bytes(mine ^ theirs ^ was for mine, theirs, was in zip(own, changed, original, strict=True))


@pytest.mark.parametrize("end", [a_dialer, a_listener])
def test_another_protocol_is_named_at_both_ends(end: Callable[[], Handshake]) -> None:
    here = end()
    here.output()
    with pytest.raises(MismatchError, match=f"protocol 9, this process protocol {PROTOCOL}"):
        feed(here, message(HandshakeStep.CHALLENGE, protocol=9))
    answer, there = here.output(), a_listener()
    assert answer[4] == PROTOCOL
    with pytest.raises(MismatchError, match="protocol 9"):
        feed(there, answer[:4] + b"\x09" + answer[5:])


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 40, b"G\x16\x03", b"GSM1\0\0\0\0"]
)
def test_other_programs_are_malformed_at_their_first_bytes(data: bytes) -> None:
    for end in (a_dialer(), a_listener()):
        with pytest.raises(MalformedError, match="not a handshake"):
            feed(end, data)
        assert end.wanted_bytes == 0


@pytest.mark.parametrize("length", [0, 63, 165, 2**31, 2**32 - 1])
def test_a_length_is_refused_before_its_body_is_received(length: int) -> None:
    with pytest.raises(MalformedError, match="announces"):
        feed(a_listener(), message(HandshakeStep.HELLO, length=length))
    dialer = a_dialer()
    with pytest.raises(MalformedError, match="announces"):
        feed(dialer, message(HandshakeStep.CHALLENGE, length=length))
    for step in (HandshakeStep.ACCEPT, HandshakeStep.REFUSE):
        if length > 132:
            feed(dialer := a_dialer(), a_listener().output())
            with pytest.raises(MalformedError, match="announces"):
                feed(dialer, message(step, length=length))


@pytest.mark.parametrize(("step", "flags"), [(2, 0), (3, 0), (4, 0), (5, 0), (0, 0), (255, 0), (1, 1)])
def test_a_message_out_of_place_is_malformed(step: int, flags: int) -> None:
    with pytest.raises(MalformedError, match="expected"):
        feed(a_dialer(), message(step, bytes(32), flags=flags))


def test_a_second_hello_is_not_read() -> None:
    dialer, listener = a_dialer(), a_listener()
    feed(dialer, listener.output())
    hello = dialer.output()
    assert feed(listener, hello + hello) == hello
    assert listener.receive(hello) == 0


def test_noise_never_authenticates() -> None:
    draw = random.Random(11)
    for _ in range(300):
        for end in (a_dialer(), a_listener()):
            noise = draw.randbytes(draw.randrange(1, 200))
            with suppress(MalformedError, MismatchError, WrongKeyError):
                feed(end, message(draw.randrange(6), noise) if draw.random() < 0.5 else b"GSMR" + noise)
            assert not (isinstance(end, Listener) and end.is_proven(KEY))
            assert not (isinstance(end, Dialer) and end.accepted is not None)


def test_parts_of_a_keyed_hash_cannot_be_shifted() -> None:
    assert keyed_hash(KEY, b"a", b"bc") != keyed_hash(KEY, b"ab", b"c")
    assert keyed_hash(KEY, b"a") != keyed_hash(OTHER_KEY, b"a")
    assert keyed_hash(b"", b"a") == keyed_hash(b"", b"a")


def test_a_listener_that_has_opened_the_connection_knocks_and_then_takes_its_role() -> None:
    """The other end has accepted the connection, so it has sent a challenge, and becomes the dialer."""
    accepting, knocking = Listener(PURPOSE, limit_bytes=100, takes_knocks=True), Listener(PURPOSE, knock=b"rank 3")
    rest = feed(accepting, knocking.output())
    assert (accepting.knocked, accepting.claims) == (b"rank 3", None)
    assert feed(knocking, accepting.output()) == b""
    dialer = a_dialer()
    feed(dialer, rest)
    feed(knocking, dialer.output())
    knocking.accept(KEY, ANSWER)
    feed(dialer, knocking.output())
    assert dialer.accepted == ANSWER


def test_ends_that_have_opened_one_connection_at_the_same_time_ignore_the_knock() -> None:
    dialer, knocking = Dialer(PURPOSE, KEY, CLAIMS, takes_knocks=True), Listener(PURPOSE, knock=b"rank 3")
    assert not dialer.was_challenged
    feed(dialer, knocking.output())
    assert dialer.was_challenged
    feed(knocking, dialer.output())
    assert knocking.is_proven(KEY)


def test_a_knock_is_refused_where_it_is_not_expected_and_a_second_challenge_always() -> None:
    with pytest.raises(MalformedError, match="expected HELLO"):
        feed(a_listener(), Listener(PURPOSE, knock=b"rank 3").output())
    knocking, challenge = Listener(PURPOSE, knock=b"rank 3"), a_listener().output()
    feed(knocking, challenge)
    with pytest.raises(MalformedError, match="expected HELLO"):
        feed(knocking, challenge)
