"""Strangers are found out, whatever they repeat, change or reflect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from support.wire_pairs import ASKING, SERVED, authenticated_pair, credentials, feed, sent, shake

from gossamer.base.kernels import polyval
from gossamer.base.peer_ops import Peer, Push, Stamp
from gossamer.comm.wire import authentication, frames
from gossamer.comm.wire.connection_state import ConnectionState
from gossamer.comm.wire.frame_mac import HANDSHAKE
from gossamer.comm.wire.messages import encode_ask
from gossamer.errors import ConnectError, MalformedError, MismatchError, PeerLost


def test_two_that_hold_the_token_meet_and_know_each_other() -> None:
    dialer, listener = authenticated_pair()
    assert dialer.authenticated is not None
    assert listener.authenticated is not None
    assert (dialer.authenticated.peer, listener.authenticated.peer) == (SERVED, ASKING)
    assert (dialer.authenticated.sending_epoch, dialer.authenticated.receiving_epoch) == (
        listener.authenticated.receiving_epoch,
        listener.authenticated.sending_epoch,
    )
    assert dialer.authenticated.sending_epoch != dialer.authenticated.receiving_epoch


@pytest.mark.parametrize("compiled", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_payloads_are_hashed_by_what_both_ends_have(
    compiled: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not polyval.available():
        pytest.skip("no kernels were compiled here")
    listener = ConnectionState(credentials(SERVED))

    def carry(at: bool, source: ConnectionState, to: ConnectionState) -> None:
        monkeypatch.setattr(polyval, "available", lambda: at)
        feed(to, sent(source))

    monkeypatch.setattr(polyval, "available", lambda: compiled[0])
    dialer = ConnectionState(credentials(), SERVED)
    carry(compiled[1], dialer, listener)
    carry(compiled[0], listener, dialer)
    carry(compiled[1], dialer, listener)
    op = encode_ask(Push(to=SERVED, key="w", stamp=Stamp(3, 0), payload=(torch.arange(9.0),)), 0)
    (heard,) = feed(listener, b"".join(dialer.send(op)))
    assert torch.equal(heard.payload[0], torch.arange(9.0))
    assert listener.authenticated is not None
    fast = isinstance(listener.authenticated.receiving_mac.new_payload_hash(), polyval.Polyval)
    assert fast == all(compiled)


@pytest.mark.parametrize(
    ("field", "other"),
    [("recipe", "OneBit()"), ("layout", "ffff"), ("run", "another"), ("gossamer", "0.0.9"), ("largest_frame_bytes", 9)],
)
def test_what_differs_is_named_with_both_values_at_both_ends(field: str, other: Any) -> None:
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED, **{field: other}))
    shake(dialer, listener)
    for end in (dialer, listener):
        assert end.authenticated is None
        assert isinstance(end.refusal, MismatchError)
        assert repr(other) in str(end.refusal)
        assert repr(getattr(credentials(), field)) in str(end.refusal)


def test_another_token_is_found_by_the_dialer_and_shows_the_listener_nothing() -> None:
    dialer, listener = (
        ConnectionState(credentials(), SERVED),
        ConnectionState(credentials(SERVED, token=bytes(32), run="other")),
    )
    with pytest.raises(ConnectError, match=r"another token.*run 'other'.*run 'run'"):
        shake(dialer, listener)
    assert sent(dialer) == b""
    assert dialer.authenticated is listener.authenticated is None


def test_a_dialer_that_does_not_check_is_found_by_the_listener() -> None:
    listener = ConnectionState(credentials(SERVED))
    liar = ConnectionState(credentials(token=bytes(32)), SERVED)
    feed(listener, sent(liar))
    with pytest.raises(ConnectError, match="another token"):
        feed(listener, _proof_of_a_liar(liar, sent(listener)))
    assert listener.authenticated is None


def _proof_of_a_liar(liar: ConnectionState, heard: bytes) -> bytes:
    """What a dialer says that answers any proof with its own."""
    with pytest.raises(ConnectError):
        feed(liar, heard)
    message = liar._handshake._proof(authentication.DIALER)
    return b"".join(liar.send(message))


def test_promise_15_a_replayed_dialer_is_refused() -> None:
    recorded: list[bytes] = []
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    hello = sent(dialer)
    feed(listener, hello)
    feed(dialer, sent(listener))
    proof = sent(dialer)
    feed(listener, proof)
    assert listener.authenticated is not None
    recorded += [hello, proof]
    again = ConnectionState(credentials(SERVED))
    with pytest.raises(ConnectError, match="another token"):
        feed(again, b"".join(recorded))
    assert again.authenticated is None


def test_without_a_nonce_of_its_own_the_listener_would_believe_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication.secrets, "token_bytes", lambda size: bytes(size))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_promise_15_a_replayed_dialer_is_refused()


def test_a_replayed_listener_is_refused() -> None:
    listener = ConnectionState(credentials(SERVED))
    feed(listener, sent(ConnectionState(credentials(), SERVED)))
    recorded = sent(listener)
    again = ConnectionState(credentials(), SERVED)
    sent(again)
    with pytest.raises(ConnectError, match="another token"):
        feed(again, recorded)


def test_what_is_reflected_is_refused() -> None:
    dialer = ConnectionState(credentials(), SERVED)
    with pytest.raises(PeerLost, match="worker 3 called server 0 and was answered by worker 3"):
        feed(dialer, sent(dialer))
    mirror, listener = ConnectionState(credentials(SERVED), SERVED), ConnectionState(credentials(SERVED))
    with pytest.raises(PeerLost, match="server 0 was called by server 0"):
        feed(listener, sent(mirror))


def test_a_proof_of_one_direction_proves_nothing_in_the_other() -> None:
    """A man in the middle gives a dialer's messages to its own listening side, and the answer back."""
    victim = ConnectionState(credentials(), SERVED)
    its_own_listener = ConnectionState(credentials())
    with pytest.raises(PeerLost):
        feed(its_own_listener, sent(victim))
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    feed(listener, sent(dialer))
    heard = sent(listener)
    feed(dialer, heard)
    sent(dialer)
    proof_bytes = heard[-_length_of_a_proof() :]
    with pytest.raises(ConnectError, match="another token"):
        feed(listener, proof_bytes)


def _length_of_a_proof() -> int:
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    feed(listener, sent(dialer))
    feed(dialer, sent(listener))
    return len(sent(dialer))


def test_without_directions_a_reflected_proof_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "LISTENER", authentication.DIALER)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_proof_of_one_direction_proves_nothing_in_the_other()


def test_whoever_answers_at_the_wrong_address_is_not_believed() -> None:
    other = Peer("server", 1)
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(other))
    with pytest.raises(PeerLost, match=r"server 1 was called by worker 3, who wanted server 0"):
        feed(listener, sent(dialer))
    answering = ConnectionState(credentials(other))
    feed(answering, sent(ConnectionState(credentials(), other)))
    with pytest.raises(PeerLost, match="called server 0 and was answered by server 1"):
        feed(dialer, sent(answering))


@pytest.mark.parametrize(
    "change", [{"recipe": "X"}, {"me": ("worker", 4)}, {"largest_frame_bytes": 5}, {"polyval": False}], ids=str
)
def test_nothing_of_a_hello_can_be_changed_on_its_way(change: dict[str, Any]) -> None:
    """A man in the middle rewrites the dialer's hello, checksums and all."""
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    record = authentication.Credentials.hello(credentials(), SERVED)
    sent(dialer)
    changed = authentication.encode_record(frames.Kind.HELLO, _replaced(record, change))
    feed(listener, b"".join(changed.frame(HANDSHAKE, 0, 0)))
    with pytest.raises((ConnectError, PeerLost), match=r"another token|wanted worker 4"):
        feed(dialer, sent(listener))


def _replaced(record: authentication.HelloRecord, change: dict[str, Any]) -> authentication.HelloRecord:
    return msgspec.structs.replace(record, **change)


def test_a_listener_answers_another_protocol_so_that_both_can_name_both() -> None:
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    hello = bytearray(sent(dialer))
    hello[4] = 9
    with pytest.raises(MismatchError, match="protocol 9 and this one 2"):
        feed(listener, bytes(hello))
    answer = sent(listener)
    assert frames.Header.parse(answer[: frames.HEADER_BYTES], HANDSHAKE.begin()).kind is frames.Kind.PING
    newer = bytearray(answer)
    newer[4] = 9
    with pytest.raises(MismatchError, match="protocol 9 and this one 2"):
        feed(dialer, bytes(newer))


def test_strangers_get_64_kib_and_no_word() -> None:
    listener = ConnectionState(credentials(SERVED))
    big = frames.Message(kind=frames.Kind.HELLO, control=bytes(2**16 + 1))
    with pytest.raises(MalformedError, match="announces"):
        feed(listener, b"".join(big.frame(HANDSHAKE, 0, 0)))
    for kind in set(frames.Kind) - {frames.Kind.HELLO, frames.Kind.PROOF}:
        op = frames.Message(kind=kind, control=b"\x80")
        with pytest.raises(MalformedError, match="no place here"):
            feed(ConnectionState(credentials(SERVED)), b"".join(op.frame(HANDSHAKE, 0, 0)))


def test_a_proof_before_a_hello_and_a_second_hello_are_malformed() -> None:
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    hello = sent(dialer)
    feed(listener, hello)
    again = authentication.encode_record(frames.Kind.HELLO, credentials().hello(SERVED))
    with pytest.raises(MalformedError, match="where a handshake stands"):
        feed(listener, b"".join(again.frame(HANDSHAKE, 0, 1)))
    proof = authentication.encode_record(frames.Kind.PROOF, authentication.ProofRecord(mac=bytes(32)))
    with pytest.raises(MalformedError, match="where a handshake stands"):
        feed(ConnectionState(credentials(SERVED)), b"".join(proof.frame(HANDSHAKE, 0, 0)))


def test_the_token_is_not_shown() -> None:
    assert "token" not in repr(credentials())


@pytest.mark.parametrize("kind", ["worker\x1b[2J", "worker\n", "w" * 60_000, ""])
def test_a_stranger_writes_nothing_into_messages_by_its_name(kind: str) -> None:
    listener = ConnectionState(credentials(SERVED))
    with pytest.raises(MalformedError):
        feed(listener, sent(ConnectionState(credentials(Peer(kind, 1)), SERVED)))


def test_a_stranger_fills_no_screen() -> None:
    dialer, listener = (
        ConnectionState(credentials(), SERVED),
        ConnectionState(credentials(SERVED, token=bytes(32), run="r" * 60_000)),
    )
    with pytest.raises(ConnectError) as refusal:
        shake(dialer, listener)
    assert len(str(refusal.value)) < 1000
