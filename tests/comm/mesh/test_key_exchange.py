"""Key exchange: the curve equals that of another library, and keys depend on all values that may differ."""

from __future__ import annotations

import random

import pytest

from gossamer.comm.handshake import Dialer, Listener
from gossamer.comm.mesh.key_exchange import OFFER, POINT_BYTES, KeyShare, agreed_secret, public_key
from gossamer.comm.mesh.sealing import AES, CHACHA, LinkKeys
from gossamer.errors import ConnectError

ENDS = (3, 1)  # ranks of the caller and the called member


def shaken(key: bytes = bytes(32)) -> tuple[Dialer, Listener]:
    """Both ends of a complete handshake."""
    dialer, listener = Dialer(b"mesh", key, b"claims"), Listener(b"mesh")
    dialer.receive(listener.output())
    listener.receive(dialer.output())
    listener.accept(key)
    dialer.receive(listener.output())
    return dialer, listener


def agreed(
    shares: tuple[KeyShare, KeyShare], ends: tuple[Dialer, Listener], context: bytes = b"view 1"
) -> tuple[LinkKeys, LinkKeys]:
    """The keys at the caller and at the called member."""
    caller, called = shares
    return (
        caller.keys(called.offer, ends[0], context, ENDS, calls=True),
        called.keys(caller.offer, ends[1], context, ENDS, calls=False),
    )


def test_the_curve_equals_that_of_another_library() -> None:
    x25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")
    rng = random.Random(0)
    for _ in range(20):
        own, other = rng.randbytes(POINT_BYTES), rng.randbytes(POINT_BYTES)
        theirs = x25519.X25519PrivateKey.from_private_bytes(other).public_key()
        assert public_key(other) == theirs.public_bytes_raw()
        expected = x25519.X25519PrivateKey.from_private_bytes(own).exchange(theirs)
        assert agreed_secret(own, public_key(other)) == agreed_secret(other, public_key(own)) == expected


def test_both_ends_derive_the_same_keys_in_exchanged_roles() -> None:
    caller, called = agreed((KeyShare(), KeyShare()), shaken())
    assert (caller.sends, caller.receives) == (called.receives, called.sends)
    assert caller.sends != caller.receives
    assert caller.cipher == called.cipher
    assert caller.sends.hex() not in repr(caller)


def test_two_connections_of_one_pair_have_different_keys() -> None:
    """Otherwise two messages would be encrypted with the same key and number."""
    shares = KeyShare(), KeyShare()
    first, _ = agreed(shares, shaken())
    second, _ = agreed(shares, shaken())
    assert not {first.sends, first.receives} & {second.sends, second.receives}


def test_keys_depend_on_the_key_pairs_the_context_and_the_token() -> None:
    shares, ends = (KeyShare(), KeyShare()), shaken()
    first, _ = agreed(shares, ends)
    others = [
        agreed((shares[0], KeyShare()), ends)[0],  # which a relay that knows all other values does not have
        agreed(shares, ends, b"view 2")[0],
        agreed(shares, shaken(bytes(31) + b"1"))[0],
    ]
    assert len({each.sends for each in (first, *others)}) == 4


def test_a_member_without_aes_instructions_makes_both_use_the_other_cipher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.base.system.has_aes", lambda: True)
    fast = KeyShare()
    assert agreed((fast, KeyShare()), shaken())[0].cipher == AES
    monkeypatch.setattr("gossamer.base.system.has_aes", lambda: False)
    for shares in ((fast, KeyShare()), (KeyShare(), fast)):
        assert {each.cipher for each in agreed(shares, shaken())} == {CHACHA}


@pytest.mark.parametrize(
    "offer", [OFFER.pack(True, bytes(POINT_BYTES)), OFFER.pack(True, b"\1" + bytes(POINT_BYTES - 1)), b"", bytes(34)]
)
def test_public_keys_of_small_order_or_of_another_length_are_refused(offer: bytes) -> None:
    """With a point of small order the secret would not depend on this member's key."""
    with pytest.raises(ConnectError, match="public key"):
        KeyShare().keys(offer, shaken()[0], b"", ENDS, calls=True)
