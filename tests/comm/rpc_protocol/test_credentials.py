"""Peers authenticate by the handshake, and compare what must be equal in one run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.wire_pairs import ASKING, SERVED, authenticated_pair, credentials, feed, sent, shake

from gossamer.base.kernels import polyval
from gossamer.base.peer_ops import Peer, Push, Stamp
from gossamer.comm.handshake import PROTOCOL
from gossamer.comm.rpc_protocol.connection_state import ConnectionState
from gossamer.comm.rpc_protocol.messages import PING, encode_ask
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
    carry(compiled[0], listener, dialer)
    carry(compiled[1], dialer, listener)
    carry(compiled[0], listener, dialer)
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
def test_a_difference_is_named_with_both_values_at_both_ends(field: str, other: Any) -> None:
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED, **{field: other}))
    shake(dialer, listener)
    for end in (dialer, listener):
        assert end.authenticated is None
        assert isinstance(end.refusal, MismatchError)
        assert repr(other) in str(end.refusal)
        assert repr(getattr(credentials(), field)) in str(end.refusal)


def test_another_token_is_named_with_both_runs_at_both_ends() -> None:
    dialer = ConnectionState(credentials(), SERVED)
    listener = ConnectionState(credentials(SERVED, token=bytes(32), run="other"))
    feed(dialer, sent(listener))
    with pytest.raises(ConnectError, match=r"another token.*run 'run'.*run 'other'"):
        feed(listener, sent(dialer))
    with pytest.raises(ConnectError, match=r"another token.*run 'other'.*run 'run'"):
        feed(dialer, sent(listener))
    assert dialer.authenticated is listener.authenticated is None


def test_promise_15_a_recorded_dialer_is_refused() -> None:
    """The handshake's own tests have the other attacks; this one shows that peers use it."""
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    feed(dialer, sent(listener))
    feed(listener, hello := sent(dialer))
    assert listener.authenticated is not None
    again = ConnectionState(credentials(SERVED))
    with pytest.raises(ConnectError, match="another token"):
        feed(again, hello)
    assert again.authenticated is None


def test_a_peer_at_the_wrong_address_is_refused() -> None:
    other = Peer("server", 1)
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(other))
    feed(dialer, sent(listener))
    with pytest.raises(PeerLost, match=r"server 1 was dialed by worker 3, which expected server 0"):
        feed(listener, sent(dialer))
    mirror, listener = ConnectionState(credentials(SERVED), SERVED), ConnectionState(credentials(SERVED))
    feed(mirror, sent(listener))
    with pytest.raises(PeerLost, match="server 0 was dialed by server 0"):
        feed(listener, sent(mirror))


def test_a_listener_that_claims_to_be_another_peer_is_refused() -> None:
    """It holds the token and takes every call."""
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(Peer("server", 1)))
    listener._handshake._expect_dialed = lambda hello: Peer(*hello.me)  # type: ignore[method-assign]
    feed(dialer, sent(listener))
    feed(listener, sent(dialer))
    with pytest.raises(PeerLost, match="dialed server 0 and was answered by server 1"):
        feed(dialer, sent(listener))


def test_another_protocol_is_named_at_both_ends() -> None:
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    challenge = bytearray(sent(listener))
    challenge[4] = 9
    with pytest.raises(MismatchError, match=f"protocol 9, this process protocol {PROTOCOL}"):
        feed(dialer, bytes(challenge))
    answer = bytearray(sent(dialer))
    answer[4] = 9
    with pytest.raises(MismatchError, match=f"protocol 9, this process protocol {PROTOCOL}"):
        feed(listener, bytes(answer))


def test_no_frame_is_read_before_the_end_of_the_handshake() -> None:
    dialer, _ = authenticated_pair()
    with pytest.raises(MalformedError):
        feed(ConnectionState(credentials(SERVED)), b"".join(dialer.send(PING)))


def test_frames_may_follow_the_handshake_in_the_same_bytes() -> None:
    dialer, listener = ConnectionState(credentials(), SERVED), ConnectionState(credentials(SERVED))
    feed(dialer, sent(listener))
    feed(listener, sent(dialer))
    (frame,) = feed(dialer, sent(listener) + b"".join(listener.send(PING)))
    assert frame.kind is PING.kind


def test_the_token_is_not_shown() -> None:
    assert "token" not in repr(credentials())


@pytest.mark.parametrize("kind", ["worker\x1b[2J", "worker\n", "w" * 60_000, ""])
def test_a_stranger_writes_nothing_into_messages_by_its_name(kind: str) -> None:
    listener = ConnectionState(credentials(SERVED))
    with pytest.raises(MalformedError):
        shake(ConnectionState(credentials(Peer(kind, 1)), SERVED), listener)


def test_a_stranger_fills_no_screen() -> None:
    dialer, listener = (
        ConnectionState(credentials(token=bytes(32), run="r" * 60_000), SERVED),
        ConnectionState(credentials(SERVED)),
    )
    with pytest.raises(ConnectError) as refusal:
        shake(dialer, listener)
    assert len(str(refusal.value)) < 1000
