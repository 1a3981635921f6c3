"""Strangers are found out, whatever they repeat, change or reflect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.wire_pairs import ASKING, SERVED, acquainted, feed, papers, said, shake

from gossamer.core.peer_ops import Peer
from gossamer.errors import ConnectError, MalformedError, MismatchError, PeerLost
from gossamer.transports.wire import authentication, frames
from gossamer.transports.wire.connection_state import ConnectionState


def test_two_that_hold_the_token_meet_and_know_each_other() -> None:
    dialler, listener = acquainted()
    assert dialler.met is not None
    assert listener.met is not None
    assert (dialler.met.peer, listener.met.peer) == (SERVED, ASKING)
    assert (dialler.met.saying_epoch, dialler.met.hearing_epoch) == (
        listener.met.hearing_epoch,
        listener.met.saying_epoch,
    )
    assert dialler.met.saying_epoch != dialler.met.hearing_epoch


@pytest.mark.parametrize(
    ("field", "other"),
    [("recipe", "OneBit()"), ("layout", "ffff"), ("run", "another"), ("gossamer", "0.0.9"), ("largest_frame_bytes", 9)],
)
def test_what_differs_is_named_with_both_values_at_both_ends(field: str, other: Any) -> None:
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED, **{field: other}))
    shake(dialler, listener)
    for end in (dialler, listener):
        assert end.met is None
        assert isinstance(end.refused, MismatchError)
        assert repr(other) in str(end.refused)
        assert repr(getattr(papers(), field)) in str(end.refused)


def test_another_token_is_found_by_the_dialler_and_shows_the_listener_nothing() -> None:
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED, token=bytes(32), run="other"))
    with pytest.raises(ConnectError, match=r"another token.*run 'other'.*run 'run'"):
        shake(dialler, listener)
    assert said(dialler) == b""
    assert dialler.met is listener.met is None


def test_a_dialler_that_does_not_check_is_found_by_the_listener() -> None:
    listener = ConnectionState(papers(SERVED))
    liar = ConnectionState(papers(token=bytes(32)), SERVED)
    feed(listener, said(liar))
    with pytest.raises(ConnectError, match="another token"):
        feed(listener, _proof_of_a_liar(liar, said(listener)))
    assert listener.met is None


def _proof_of_a_liar(liar: ConnectionState, heard: bytes) -> bytes:
    """What a dialler says that answers any proof with its own."""
    with pytest.raises(ConnectError):
        feed(liar, heard)
    message = liar._handshake._proof(authentication.DIALLER)
    return b"".join(liar.frame(message))


def test_a_replayed_dialler_is_refused() -> None:
    recorded: list[bytes] = []
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED))
    hello = said(dialler)
    feed(listener, hello)
    feed(dialler, said(listener))
    proof = said(dialler)
    feed(listener, proof)
    assert listener.met is not None
    recorded += [hello, proof]
    again = ConnectionState(papers(SERVED))
    with pytest.raises(ConnectError, match="another token"):
        feed(again, b"".join(recorded))
    assert again.met is None


def test_without_a_nonce_of_its_own_the_listener_would_believe_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication.secrets, "token_bytes", lambda size: bytes(size))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_replayed_dialler_is_refused()


def test_a_replayed_listener_is_refused() -> None:
    listener = ConnectionState(papers(SERVED))
    feed(listener, said(ConnectionState(papers(), SERVED)))
    recorded = said(listener)
    again = ConnectionState(papers(), SERVED)
    said(again)
    with pytest.raises(ConnectError, match="another token"):
        feed(again, recorded)


def test_what_is_reflected_is_refused() -> None:
    dialler = ConnectionState(papers(), SERVED)
    with pytest.raises(PeerLost, match="worker 3 called server 0 and was answered by worker 3"):
        feed(dialler, said(dialler))
    mirror, listener = ConnectionState(papers(SERVED), SERVED), ConnectionState(papers(SERVED))
    with pytest.raises(PeerLost, match="server 0 was called by server 0"):
        feed(listener, said(mirror))


def test_a_proof_of_one_direction_proves_nothing_in_the_other() -> None:
    """Somebody in the middle gives a dialler's words to its own listening side, and the answer back."""
    victim = ConnectionState(papers(), SERVED)
    its_own_listener = ConnectionState(papers())
    with pytest.raises(PeerLost):
        feed(its_own_listener, said(victim))
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED))
    feed(listener, said(dialler))
    heard = said(listener)
    feed(dialler, heard)
    said(dialler)
    proof_bytes = heard[-_length_of_a_proof() :]
    with pytest.raises(ConnectError, match="another token"):
        feed(listener, proof_bytes)


def _length_of_a_proof() -> int:
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED))
    feed(listener, said(dialler))
    feed(dialler, said(listener))
    return len(said(dialler))


def test_without_directions_a_reflected_proof_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "LISTENER", authentication.DIALLER)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_proof_of_one_direction_proves_nothing_in_the_other()


def test_whoever_answers_at_the_wrong_address_is_not_believed() -> None:
    other = Peer("server", 1)
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(other))
    with pytest.raises(PeerLost, match=r"server 1 was called by worker 3, who wanted server 0"):
        feed(listener, said(dialler))
    answering = ConnectionState(papers(other))
    feed(answering, said(ConnectionState(papers(), other)))
    with pytest.raises(PeerLost, match="called server 0 and was answered by server 1"):
        feed(dialler, said(answering))


@pytest.mark.parametrize("change", [{"recipe": "X"}, {"me": ("worker", 4)}, {"largest_frame_bytes": 5}], ids=str)
def test_nothing_of_a_hello_can_be_changed_on_its_way(change: dict[str, Any]) -> None:
    """Somebody in the middle rewrites the dialler's hello, checksums and all."""
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED))
    record = authentication.Credentials.hello(papers(), SERVED)
    said(dialler)
    changed = authentication.message_of(frames.Kind.HELLO, _replaced(record, change))
    feed(listener, b"".join(changed.frame(0, 0)))
    with pytest.raises((ConnectError, PeerLost), match=r"another token|wanted worker 4"):
        feed(dialler, said(listener))


def _replaced(record: authentication.HelloRecord, change: dict[str, Any]) -> authentication.HelloRecord:
    return msgspec.structs.replace(record, **change)


def test_a_listener_answers_another_protocol_so_that_both_can_name_both() -> None:
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED))
    hello = bytearray(said(dialler))
    hello[4] = 9
    with pytest.raises(MismatchError, match="protocol 9 and this one 1"):
        feed(listener, bytes(hello))
    answer = said(listener)
    assert frames.Header.parse(answer).kind is frames.Kind.PING
    newer = bytearray(answer)
    newer[4] = 9
    with pytest.raises(MismatchError, match="protocol 9 and this one 1"):
        feed(dialler, bytes(newer))


def test_strangers_get_64_kib_and_no_word() -> None:
    listener = ConnectionState(papers(SERVED))
    big = frames.Message(kind=frames.Kind.HELLO, control=bytes(2**16 + 1))
    with pytest.raises(MalformedError, match="announces"):
        feed(listener, b"".join(big.frame(0, 0)))
    for kind in set(frames.Kind) - {frames.Kind.HELLO, frames.Kind.PROOF}:
        op = frames.Message(kind=kind, control=b"\x80")
        with pytest.raises(MalformedError, match="no place here"):
            feed(ConnectionState(papers(SERVED)), b"".join(op.frame(0, 0)))


def test_a_proof_before_a_hello_and_a_second_hello_are_malformed() -> None:
    dialler, listener = ConnectionState(papers(), SERVED), ConnectionState(papers(SERVED))
    hello = said(dialler)
    feed(listener, hello)
    again = authentication.message_of(frames.Kind.HELLO, papers().hello(SERVED))
    with pytest.raises(MalformedError, match="where a handshake stands"):
        feed(listener, b"".join(again.frame(0, 1)))
    proof = authentication.message_of(frames.Kind.PROOF, authentication.ProofRecord(mac=bytes(32)))
    with pytest.raises(MalformedError, match="where a handshake stands"):
        feed(ConnectionState(papers(SERVED)), b"".join(proof.frame(0, 0)))


def test_the_token_is_not_shown() -> None:
    assert "token" not in repr(papers())


@pytest.mark.parametrize("kind", ["worker\x1b[2J", "worker\n", "w" * 60_000, ""])
def test_a_stranger_writes_nothing_into_messages_by_its_name(kind: str) -> None:
    listener = ConnectionState(papers(SERVED))
    with pytest.raises(MalformedError):
        feed(listener, said(ConnectionState(papers(Peer(kind, 1)), SERVED)))


def test_a_stranger_fills_no_screen() -> None:
    dialler, listener = (
        ConnectionState(papers(), SERVED),
        ConnectionState(papers(SERVED, token=bytes(32), run="r" * 60_000)),
    )
    with pytest.raises(ConnectError) as refusal:
        shake(dialler, listener)
    assert len(str(refusal.value)) < 1000
