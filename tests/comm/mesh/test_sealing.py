"""Sealing: keys that only the two ends of a connection come to, and without encryption no library is needed."""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.certificates import certificates, contexts, old

from gossamer.base import system
from gossamer.comm.libcrypto import AES, CHACHA
from gossamer.comm.mesh import sealing
from gossamer.comm.mesh.greeter import MembersUnreached
from gossamer.comm.mesh.sealing import LinkKeys, agree, agree_group, shake_hands
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError

TOKEN, CONTEXT = bytes(range(32)), b"what was said when they met"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
def tls(folder: Path) -> Tls:
    return contexts(folder)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection over TCP, from the called one's end and the caller's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calls = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    with called, calls:
        yield called, calls


End = tuple[socket.socket, LinkKeys]


def hands(
    pair: tuple[socket.socket, socket.socket],
    *each: tuple[Tls, bytes, bytes],
    calls: tuple[bool, bool] = (False, True),
) -> list[End | BaseException]:
    """What both ends come to, at once. each: contexts, token and context of both, or of the two."""
    ends = each * 2 if len(each) == 1 else each

    def one(number: int) -> End:
        return shake_hands(pair[number], *ends[number], (1, 0), calls=number == 1, seconds=5.0)

    with ThreadPoolExecutor(2) as pool:
        tickets = [pool.submit(one, number) for number in (0, 1)]
        return [ticket.exception(20) or ticket.result() for ticket in tickets]


def keys(ends: list[End | BaseException]) -> list[LinkKeys]:
    for end in ends:
        assert isinstance(end, tuple), end
        end[0].close()
    return [end[1] for end in ends if isinstance(end, tuple)]


def test_both_ends_come_to_the_same_keys_one_for_each_way(pair, tls) -> None:
    low, high = keys(hands(pair, (tls, TOKEN, CONTEXT)))
    assert (low.sends, low.receives) == (high.receives, high.sends)
    assert low.sends != low.receives
    assert {len(low.sends), len(low.receives)} == {32}
    assert low.cipher == high.cipher == (AES if system.has_aes() else CHACHA)
    assert low.sends.hex() not in repr(low)
    assert repr(low.sends) not in repr(low)


def test_what_follows_the_handshake_at_once_is_not_swallowed(tls) -> None:
    """Neither end waits for the other before it goes on."""

    def one(connection: socket.socket, calls: bool) -> bytes:
        bare, _ = shake_hands(connection, tls, TOKEN, CONTEXT, (1, 0), calls=calls)
        assert type(bare) is socket.socket
        assert not bare.getblocking()
        with bare:
            bare.setblocking(True)
            bare.sendall(b"caller" * 5000 if calls else b"called" * 5000)
            heard = b""
            while len(heard) < 30000:
                heard += bare.recv(30000 - len(heard))
        return heard

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        for _ in range(30):
            calls = socket.create_connection(listener.getsockname())
            called, _ = listener.accept()
            tickets = [pool.submit(one, called, False), pool.submit(one, calls, True)]
            assert [ticket.result(20) for ticket in tickets] == [b"caller" * 5000, b"called" * 5000]


def test_no_two_handshakes_come_to_the_same_keys(tls) -> None:
    found = set()
    for _ in range(3):
        ends = socket.socketpair()
        found |= {key for link in keys(hands(ends, (tls, TOKEN, CONTEXT))) for key in (link.sends, link.receives)}
    assert len(found) == 6


@pytest.mark.parametrize("other", [(b"another", CONTEXT), (TOKEN, b"another")], ids=["token", "context"])
def test_a_peer_that_holds_another_token_or_met_elsewhere_comes_to_other_keys(
    pair, tls, other: tuple[bytes, bytes]
) -> None:
    low, high = keys(hands(pair, (tls, TOKEN, CONTEXT), (tls, *other)))
    assert not {low.sends, low.receives} & {high.sends, high.receives}


def test_a_peer_that_is_in_between_with_a_certificate_and_no_token_has_no_key_of_either(tls) -> None:
    (left, near), (right, far) = socket.socketpair(), socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(hands, (left, near), (tls, TOKEN, CONTEXT), (tls, b"", CONTEXT))
        second = pool.submit(hands, (far, right), (tls, b"", CONTEXT), (tls, TOKEN, CONTEXT))
        (low, one), (other, high) = keys(first.result(20)), keys(second.result(20))
    known = {one.sends, one.receives, other.sends, other.receives}
    assert not known & {low.sends, low.receives, high.sends, high.receives}


def test_keys_that_leave_out_the_token_are_found_out(tls, monkeypatch: pytest.MonkeyPatch) -> None:
    derive = sealing.derive_key
    monkeypatch.setattr(sealing, "derive_key", lambda token, *others: derive(b"", *others))
    with pytest.raises(AssertionError):
        test_a_peer_that_is_in_between_with_a_certificate_and_no_token_has_no_key_of_either(tls)


NAMED = {
    "token": TOKEN,
    "nonces": b"n" * 66,
    "context": CONTEXT,
    "ends": (1, 0),
    "cipher": AES,
    "sender": b"caller",
}
OTHERS = [
    {"token": b""},
    {"nonces": b"m" * 66},
    {"context": b""},
    {"ends": (2, 0)},
    {"ends": (1, 2)},
    {"cipher": CHACHA},
    {"sender": b"called"},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_everything_that_may_differ_makes_another_key(other: dict[str, object]) -> None:
    derive: Callable[..., bytes] = sealing.derive_key
    assert derive(**NAMED) != derive(**{**NAMED, **other})


def test_a_key_is_the_first_block_of_hkdf() -> None:
    """RFC 5869: extract with the token as salt, then expand."""
    extracted = hmac.digest(TOKEN, b"n" * 66, hashlib.sha256)
    info = hashlib.sha256(CONTEXT).digest() + bytes([0, 0, 0, 1, 0, 0, 0, 0]) + b"caller AES-256-GCM"
    derive: Callable[..., bytes] = sealing.derive_key
    assert derive(**NAMED) == hmac.digest(extracted, b"gossamer mesh " + info + b"\x01", hashlib.sha256)


def test_without_aes_at_both_ends_it_is_chacha(pair, tls, monkeypatch: pytest.MonkeyPatch) -> None:
    has = iter([True, False])
    lock = threading.Lock()

    def one() -> bool:
        with lock:
            return next(has)

    monkeypatch.setattr(system, "has_aes", one)
    assert {link.cipher for link in keys(hands(pair, (tls, TOKEN, CONTEXT)))} == {CHACHA}


# -- who is refused -------------------------------------------------------------------------------------


def test_a_certificate_of_another_authority_is_refused(pair, tls, tmp_path: Path) -> None:
    strangers = contexts(certificates(tmp_path / "theirs"))
    found = hands(pair, (tls, TOKEN, CONTEXT), (strangers, TOKEN, CONTEXT))
    assert all(isinstance(each, OSError) for each in found)


def test_who_shows_no_certificate_is_refused(pair, tls, folder: Path) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(folder / "ca.pem")
    found = hands(pair, (tls, TOKEN, CONTEXT), ((bare, bare), TOKEN, CONTEXT))
    assert isinstance(found[0], ssl.SSLError)
    assert isinstance(found[1], OSError)


def test_tls_before_1_3_is_refused(pair, tls, folder: Path) -> None:
    found = hands(pair, (tls, TOKEN, CONTEXT), (old(contexts(folder)), TOKEN, CONTEXT))
    assert all(isinstance(each, OSError) for each in found)


@pytest.mark.parametrize("says", [b"", b"\x00" * 64, b"GET / HTTP/1.0\r\n\r\n"])
def test_who_speaks_no_tls_is_refused_and_all_is_closed(pair, tls, says: bytes) -> None:
    called, calls = pair
    calls.sendall(says)
    calls.shutdown(socket.SHUT_WR)
    sockets: list[socket.socket | None] = [None, called]
    with pytest.raises(MembersUnreached, match="rank 0 and rank 1 could not agree on keys") as caught:
        agree(0, sockets, tls, TOKEN, CONTEXT)
    assert caught.value.unreached == (1,)
    assert sockets[1] is not None
    assert sockets[1].fileno() == -1


def test_who_says_nothing_is_waited_for_no_longer_than_was_said(pair, tls) -> None:
    sockets: list[socket.socket | None] = [None, pair[0]]
    with pytest.raises(MembersUnreached, match="timed out") as caught:
        agree(0, sockets, tls, TOKEN, CONTEXT, seconds=0.05)
    assert caught.value.unreached == (1,)


def test_once_it_is_over_nobody_waits_for_anybody(pair, tls) -> None:
    asked = iter([False, True])
    sockets: list[socket.socket | None] = [None, pair[0]]
    with pytest.raises(MembersUnreached, match="the group is over") as caught:
        agree(0, sockets, tls, TOKEN, CONTEXT, over=lambda: next(asked))
    assert caught.value.unreached == ()
    assert pair[1].recv(1) == b""


def test_all_ranks_hear_of_two_that_came_to_no_keys(tls, tmp_path: Path) -> None:
    """Rank 2 has a certificate of another authority."""
    strangers = contexts(certificates(tmp_path / "theirs"))
    ends: list[list[socket.socket | None]] = [[None] * 3 for _ in range(3)]
    for high in range(3):
        for low in range(high):
            ends[high][low], ends[low][high] = socket.socketpair()
    barrier, texts = threading.Barrier(3), [""] * 3

    def one(rank: int) -> object:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait(20)
            found = list(texts)
            barrier.wait(20)
            return found

        return agree_group(rank, ends[rank], strangers if rank == 2 else tls, TOKEN, gather)

    with ThreadPoolExecutor(3) as pool:
        found = [ticket.exception(30) for ticket in [pool.submit(one, rank) for rank in range(3)]]
    assert all(isinstance(each, ConnectError) and "rank 2 could not agree on keys" in str(each) for each in found[:2])
    assert isinstance(found[2], ConnectError)
    assert all(each is None or each.fileno() == -1 for end in ends for each in end)


# -- requested or not ------------------------------------------------------------------------------------


def test_a_run_with_tls_is_refused_without_libcrypto(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise ConnectError("this Python's OpenSSL is hidden")

    monkeypatch.setattr(sealing, "libcrypto", hidden)
    monkeypatch.setenv("GOSSAMER_TLS", str(folder))
    with pytest.raises(ConnectError, match="hidden"):
        sealing.mesh_tls()


def test_a_run_that_was_not_told_to_encrypt_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_TLS", raising=False)
    monkeypatch.setattr(sealing, "libcrypto", lambda: pytest.fail("looked for"))
    assert sealing.mesh_tls() is None


@pytest.mark.parametrize("other", [0, 1], ids=["called", "caller"])
def test_keys_depend_on_the_nonces_of_both_ends(tls, monkeypatch, other: int) -> None:
    """With one end's nonce fixed, keys differ from handshake to handshake by the nonce of the other end."""
    seen: list[bytes] = []
    derive = sealing.derive_key

    def spy(token: bytes, nonces: bytes, *rest: object) -> bytes:
        seen.append(nonces)
        return derive(token, nonces, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sealing, "derive_key", spy)
    keys(hands(socket.socketpair(), (tls, TOKEN, CONTEXT)))
    half = sealing.OFFER.size
    assert {len(each) for each in seen} == {2 * half}
    assert len({*seen}) == 1, "both ends derive their keys from the same nonces, in the same order"
    assert seen[0][:half] != seen[0][half:]
    halves = [seen[0][:half], seen[0][half:]]
    halves[other] = bytes(half)
    arguments = (CONTEXT, (1, 0), AES, b"caller")
    assert derive(TOKEN, b"".join(halves), *arguments) != derive(TOKEN, seen[0], *arguments)
