"""Native mesh, sealed: what somebody changes on the way, leaves out, repeats, swaps or sends elsewhere is not used."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
import torch
from support.aead import aes_gcm_opened
from support.mesh_group import MESSAGE, Group, SealedGroup, link_keys, whole_numbers
from support.mesh_programs import FORM, End, one_way
from support.mesh_programs import TAG as NAME

from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllReduceMean
from gossamer.comm.libcrypto import AES, CHACHA, CIPHERS, FUNCTIONS, cipher_functions
from gossamer.comm.mesh import native_mesh
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.program import Does
from gossamer.comm.mesh.sealing import LinkKeys
from gossamer.errors import MismatchError, PeerLost

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

HEADER, TAG = 16, 16
CHANGED = "rank 1 is gone .the received data failed authentication"
TAKES = [Does.ADD, Does.KEEP]


def said(count: int, x: torch.Tensor, keys: LinkKeys | None, tells: int = 1) -> list[bytes]:
    """What rank `tells` puts on the wire to say `x` in each of `count` operations."""
    found = []
    with End(tells, keys) as end:
        for _ in range(count):
            end.begins(one_way(Does.SEND, 1 - tells, x.nbytes), x)
            found.append(end.other.recv(10 * MESSAGE))
    return found


def heard(does: Does, stream: bytes, count: int = 1, keys: LinkKeys | None = None) -> list[torch.Tensor]:
    """Rank 0's numbers after it has taken `count` operations of four numbers from what comes as rank 1's, and no more.

    Raises what the mesh raises, with the numbers as they are then in `.numbers`.
    """
    given = [torch.full((4,), 5.0) for _ in range(count)]
    with End(0, keys or link_keys(0, 1)) as end:
        ops = [end.begins(one_way(does, 1, x.nbytes), x) for x in given]
        end.other.sendall(stream)
        end.other.shutdown(socket.SHUT_WR)
        try:
            for op in ops:
                end.mesh.wait(op)
        except (PeerLost, MismatchError) as error:
            error.numbers = given  # type: ignore[union-attr]
            raise
    return given


FOUR = torch.tensor([1.0, 2.0, 3.0, 4.0])
SUM, KEPT, UNTOUCHED, WIPED = [6.0, 7.0, 8.0, 9.0], FOUR.tolist(), [5.0] * 4, [0.0] * 4


def refused(does: Does, stream: bytes, *, count: int = 1, keys: LinkKeys | None = None, may_wipe: bool = False) -> None:
    """The last of `count` operations is not answered, and its numbers are what they were, or nothing that was sent."""
    with pytest.raises(PeerLost, match=CHANGED) as caught:
        heard(does, stream, count, keys)
    *before, last = [each.tolist() for each in caught.value.numbers]  # type: ignore[attr-defined]
    assert all(each == (SUM if does == Does.ADD else KEPT) for each in before)
    assert last == (WIPED if may_wipe and does == Does.KEEP else UNTOUCHED)


@pytest.fixture(scope="module")
def records() -> list[bytes]:
    """What rank 1 says to rank 0 in three operations."""
    return said(3, FOUR, link_keys(1, 0))


# -- what nobody changed --------------------------------------------------------------------------------


@pytest.mark.parametrize("does", TAKES, ids=str)
def test_what_nobody_changed_is_taken(does: Does, records: list[bytes]) -> None:
    assert [len(each) for each in records] == [HEADER + TAG + FOUR.nbytes + TAG] * 3
    expected = SUM if does == Does.ADD else KEPT
    assert [each.tolist() for each in heard(does, b"".join(records), count=3)] == [expected] * 3


def test_nothing_of_what_is_said_is_on_the_wire_and_nothing_looks_the_same_twice(records: list[bytes]) -> None:
    plain = said(1, FOUR, None)[0]
    assert plain[HEADER:] == FOUR.numpy().tobytes()
    for record in records:
        assert plain[:HEADER] not in record
        assert FOUR.numpy().tobytes() not in record
    pieces = [record[at : at + 16] for record in records for at in range(0, len(record), 16)]
    assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize(
    ("cipher", "expected"),
    [
        # Test case 14 of McGrew & Viega 2005, The Galois/Counter Mode of Operation: all zeros
        (AES, "cea7403d4d606b6e074ec5d3baf39d18 d0d1c8a799996bf0265b98b5d48ab919"),
        # Appendix A.1 of RFC 8439: the key stream of all zeros begins its second block so
        (CHACHA, "9f07e7be5551387a98ba977c732d080d"),
    ],
)
def test_a_header_of_zeros_under_a_key_of_zeros_is_the_known_answer(cipher: str, expected: str) -> None:
    """The first operation's number, its form, its tag and its place are 0, and so is the first nonce."""
    zeros = bytes(32)
    record = said_with_form(0, LinkKeys(cipher, zeros, zeros))
    assert record.hex().startswith(expected.replace(" ", ""))


def said_with_form(form: int, keys: LinkKeys) -> bytes:
    with End(1, keys) as end:
        end.begins(one_way(Does.SEND, 0, FOUR.nbytes, form=form, tag=0), FOUR)
        return end.other.recv(MESSAGE)


def test_another_program_opens_what_is_sealed_by_the_key_and_the_count(records: list[bytes]) -> None:
    """The count of what was sealed before, from the highest byte to the lowest, is the nonce."""
    key, head = link_keys(1, 0).sends, HEADER + TAG
    parts = [part for record in records for part in (record[:head], record[head:])]
    opened = [aes_gcm_opened(key, count.to_bytes(12, "big"), part) for count, part in enumerate(parts)]
    assert opened[1::2] == [FOUR.numpy().tobytes()] * 3
    assert opened[::2] == [struct.pack("<IIII", word, FORM, NAME, 0) for word in range(3)]
    assert aes_gcm_opened(key, bytes(12), parts[1]) is None
    assert aes_gcm_opened(link_keys(1, 0).receives, bytes(12), parts[0]) is None


@pytest.mark.parametrize("cipher", list(CIPHERS))
def test_long_messages_in_every_cipher(cipher: str) -> None:
    class Ciphered(Group):
        def mesh(self, rank: int) -> Mesh:
            return Mesh(rank, self.sockets[rank], keys={1 - rank: link_keys(rank, 1 - rank, cipher)})

    given = whole_numbers(2, 5 * MESSAGE // 4 + 3)
    with Ciphered(2) as group:
        for each in group.answers([AllReduceMean(each) for each in given]):
            assert torch.equal(each, sum(given) / 2)


# -- what somebody changed ------------------------------------------------------------------------------


def flips(record: bytes) -> Iterator[tuple[int, bytes]]:
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        yield bit // 8, bytes(changed)


@pytest.mark.parametrize("does", TAKES, ids=str)
def test_every_changed_bit_is_noticed(does: Does, records: list[bytes]) -> None:
    for at, changed in flips(records[0]):
        refused(does, changed, may_wipe=at >= HEADER + TAG)


@pytest.mark.parametrize("does", TAKES, ids=str)
def test_a_change_in_a_later_record_leaves_what_came_before(does: Does, records: list[bytes]) -> None:
    changed = records[1][:-1] + bytes([records[1][-1] ^ 128])
    refused(does, records[0] + changed, count=2, may_wipe=True)


@pytest.mark.parametrize("does", TAKES, ids=str)
def test_what_ends_early_is_no_answer(does: Does, records: list[bytes]) -> None:
    for length in range(len(records[0])):
        with pytest.raises(PeerLost, match="it closed the connection") as caught:
            heard(does, records[0][:length])
        if does == Does.ADD or length <= HEADER + TAG:
            assert caught.value.numbers[0].tolist() == UNTOUCHED  # type: ignore[attr-defined]


@pytest.mark.parametrize("does", TAKES, ids=str)
@pytest.mark.parametrize(
    ("count", "made"),
    [
        (2, lambda a, b, c: a + a),
        (2, lambda a, b, c: a + c),
        (1, lambda a, b, c: b + a),
        (1, lambda a, b, c: b),
        (1, lambda a, b, c: a[HEADER + TAG :] + a),
        (1, lambda a, b, c: bytes(len(a)) + a),
    ],
    ids=["said twice", "one left out", "swapped", "the first left out", "without a header", "something before it"],
)
def test_records_in_another_order_are_noticed(
    does: Does, count: int, made: Callable[[bytes, bytes, bytes], bytes], records: list[bytes]
) -> None:
    refused(does, made(*records), count=count)


@pytest.mark.parametrize("does", TAKES, ids=str)
def test_a_header_does_not_go_with_another_piece(does: Does, records: list[bytes]) -> None:
    head = HEADER + TAG
    refused(does, records[0][:head] + records[1][head:], may_wipe=True)


def test_messages_of_one_piece_may_not_be_swapped() -> None:
    x = torch.ones(MESSAGE // 2)  # two messages
    pieces, got = [], b""
    with End(1, link_keys(1, 0)) as end:
        op = end.begins(one_way(Does.SEND, 0, x.nbytes), x)
        size = HEADER + TAG + MESSAGE + TAG
        end.other.setblocking(False)
        while len(got) < 2 * size:
            end.mesh._run(op, 0)
            got += end.other.recv(MESSAGE)
        pieces = [got[:size], got[size:]]
    with End(0, link_keys(0, 1)) as end:
        target = torch.zeros_like(x)
        op = end.begins(one_way(Does.ADD, 1, x.nbytes), target)
        end.other.setblocking(False)
        end.other.send(pieces[1])
        with pytest.raises(PeerLost, match=CHANGED):
            end.mesh.wait(op)
        assert not target.any()


@pytest.mark.parametrize("does", TAKES, ids=str)
def test_what_a_rank_said_itself_is_not_taken_for_its_peers(does: Does) -> None:
    refused(does, said(1, FOUR, link_keys(0, 1), tells=0)[0])


@pytest.mark.parametrize("does", TAKES, ids=str)
def test_what_was_said_over_another_connection_is_not_taken(does: Does) -> None:
    for rank, peer in ((1, 2), (2, 0), (2, 1), (0, 2)):
        refused(does, said(1, FOUR, link_keys(rank, peer))[0])


def test_who_seals_by_another_cipher_or_not_at_all_is_not_heard() -> None:
    refused(Does.ADD, said(1, FOUR, link_keys(1, 0, CHACHA))[0])
    refused(Does.ADD, said(1, FOUR, None)[0])


def test_a_peer_that_does_not_seal_does_not_take_what_is_sealed(records: list[bytes]) -> None:
    x = torch.zeros(4)
    with End(0, None) as end:
        op = end.begins(one_way(Does.ADD, 1, x.nbytes), x)
        end.other.sendall(records[0])
        with pytest.raises(MismatchError):
            end.mesh.wait(op)
    assert not x.any()


def test_the_connection_is_closed_and_stays_so(records: list[bytes]) -> None:
    with End(0, link_keys(0, 1)) as end:
        x = torch.zeros(4)
        ops = [end.begins(one_way(Does.ADD, 1, x.nbytes), x) for _ in range(2)]
        end.other.sendall(bytes(len(records[0])) + b"".join(records))
        for op in ops:
            with pytest.raises(PeerLost, match=CHANGED):
                end.mesh.wait(op)
        assert not x.any()
        end.other.settimeout(5)
        assert end.other.recv(1) == b""


def test_all_ranks_hear_of_it() -> None:
    """Rank 2's end of one connection has another key."""

    class Odd(SealedGroup):
        def mesh(self, rank: int) -> Mesh:
            keys = {peer: link_keys(rank, peer) for peer in range(3) if peer != rank}
            if rank == 2:
                keys[0] = link_keys(2, 3)
            return Mesh(rank, self.sockets[rank], keys=keys)

    def talk(rank: int) -> str:
        x = torch.full((1000,), float(rank))
        with pytest.raises(PeerLost) as caught:
            group.transports[rank].answer(AllReduceMean(x, x))
        group.transports[rank].close()
        return str(caught.value)

    with Odd(3) as group:
        told = group.all(talk)
    assert "it was modified in transit" in told[0] + told[2]


# -- last words -----------------------------------------------------------------------------------------


def words_of(rank: int, keys: LinkKeys | None) -> bytes:
    """What a rank puts on the wire when it hangs up."""
    with End(rank, keys) as end:
        end.mesh.close("rank 7 is gone")
        return end.other.recv(MESSAGE)


def told(stream: bytes) -> str:
    with pytest.raises(PeerLost) as caught:
        heard(Does.ADD, stream)
    assert caught.value.numbers[0].tolist() == UNTOUCHED  # type: ignore[attr-defined]
    return str(caught.value)


def test_last_words_are_sealed_and_believed() -> None:
    words = words_of(1, link_keys(1, 0))
    assert b"rank 7" not in words
    assert told(words) == "rank 7 is gone, as reported by rank 1"


def test_last_words_that_somebody_else_says_are_not_believed() -> None:
    words = words_of(1, link_keys(1, 0))
    plain = words_of(1, None)
    strangers = [plain, bytes(32) + plain[32:], words_of(0, link_keys(0, 1)), words_of(1, link_keys(1, 2))]
    for forged in (*strangers, words[:-1] + bytes([words[-1] ^ 1])):
        assert "the received data failed authentication" in told(forged)


def test_last_words_are_sealed_once(records: list[bytes]) -> None:
    """Two of them by one nonce would tell each other's bytes."""
    with End(1, link_keys(1, 0)) as end:
        assert len(end.mesh._seal_words(0, bytes(480))) == 480 + TAG
        assert end.mesh._seal_words(0, bytes(480)) == b""


def test_a_connection_without_keys_is_not_left_plain() -> None:
    here, there = socket.socketpair()
    with (
        here,
        there,
        pytest.raises(ValueError, match=r"keys are missing .* ranks \[1\]"),
    ):
        Mesh(0, [None, here], keys={})


# -- the checks' broken twins ------------------------------------------------------------------------------


def with_functions(monkeypatch: pytest.MonkeyPatch, **others: object) -> None:
    """The mesh calls these in the place of libcrypto's."""

    def table(cipher: str) -> ctypes.Array[ctypes.c_void_p]:
        found = (ctypes.c_void_p * (len(FUNCTIONS) + 1))(*cipher_functions(cipher))
        for name, function in others.items():
            found[FUNCTIONS.index(name)] = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(native_mesh, "cipher_functions", table)


END = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
INIT = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5)


def test_a_mesh_that_does_not_look_at_tags_is_found_out(monkeypatch: pytest.MonkeyPatch, records: list[bytes]) -> None:
    blind = END(lambda *_: 1)
    with_functions(monkeypatch, EVP_DecryptFinal_ex=blind)
    for does in TAKES:
        for at, changed in flips(records[0]):
            if at >= HEADER:  # in what is sealed of the header it would often find that the operation is another one
                with pytest.raises(pytest.fail.Exception):
                    refused(does, changed, may_wipe=at >= HEADER + TAG)


def test_a_mesh_that_uses_a_nonce_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = bytes(12)
    kept = []
    for name in ("EVP_EncryptInit_ex", "EVP_DecryptInit_ex"):
        real = INIT(cipher_functions(AES)[FUNCTIONS.index(name)])
        kept.append(INIT(lambda *given, real=real: real(*given[:4], nothing if given[4] else None)))
    with_functions(monkeypatch, EVP_EncryptInit_ex=kept[0], EVP_DecryptInit_ex=kept[1])
    records = said(3, FOUR, link_keys(1, 0))
    assert len({record[HEADER + TAG :] for record in records}) == 1
    with pytest.raises(AssertionError):
        test_nothing_of_what_is_said_is_on_the_wire_and_nothing_looks_the_same_twice(records)
    head = HEADER + TAG
    with pytest.raises(pytest.fail.Exception):
        refused(Does.ADD, records[0][:head] + records[1][head:])


def test_a_libcrypto_that_cannot_seal_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = END(lambda *_: 0)
    with_functions(monkeypatch, EVP_EncryptFinal_ex=broken)
    with End(1, link_keys(1, 0)) as end:
        op = end.begins(one_way(Does.SEND, 0, FOUR.nbytes), FOUR)
        with pytest.raises(PeerLost):
            end.mesh.wait(op)
        end.other.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.other.recv(1)
