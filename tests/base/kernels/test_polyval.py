"""POLYVAL by every instruction set there is: the numbers of RFC 8452, and those of plain integers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from gossamer.base.kernels import library as native
from gossamer.base.kernels import polyval
from gossamer.base.kernels.polyval import PolyvalKey

DATA = random.Random(5).randbytes(20_000)
KEY = random.Random(6).randbytes(16)
LENGTHS = [*range(70), 127, 128, 129, 511, 512, 513, 1023, 1024, 4095, 4096, 9001, 20_000]
MODULUS = 1 << 128 | 1 << 127 | 1 << 126 | 1 << 121 | 1
INVERSE = 1 << 127 | 1 << 124 | 1 << 121 | 1 << 114 | 1  # of x^128: RFC 8452, section 3

Hash = Callable[[bytes, bytes], bytes]


def product(a: int, b: int) -> int:
    total = 0
    while b:
        total ^= a * (b & 1)
        a, b = a << 1, b >> 1
    for place in range(total.bit_length() - 129, -1, -1):
        if total >> (place + 128) & 1:
            total ^= MODULUS << place
    return total


def dot(a: int, b: int) -> int:
    return product(product(a, b), INVERSE)


def reference(key: bytes, data: bytes) -> bytes:
    total, h = 0, int.from_bytes(key, "little")
    h_inverse = product(h, INVERSE)
    for start in range(0, len(data), 16):
        block = data[start : start + 16].ljust(16, b"\0")
        total = product(total ^ int.from_bytes(block, "little"), h_inverse)
    return total.to_bytes(16, "little")


def compiled(key: bytes, data: bytes) -> bytes:
    running = PolyvalKey(key).begin()
    running.update(memoryview(data))
    return running.digest()


@pytest.fixture(params=[1, 2], ids=["narrow", "wide"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Limits the library to an instruction set."""
    library = native.library()
    if not polyval.available() or library is None:
        pytest.skip("it was not compiled here, or the processor does not multiply without carry")
    library.gossamer_limit_instructions(request.param)
    yield
    library.gossamer_limit_instructions(2)


def check_published(of: Hash) -> None:
    """RFC 8452, appendix A."""
    key = bytes.fromhex("25629347589242761d31f826ba4b757b")
    data = bytes.fromhex("4f4f95668c83dfb6401762bb2d01a262d1a24ddd2721d006bbe45f20d3c9f362")
    assert of(key, data) == bytes.fromhex("f7a3b47b846119fae5b7866cf5e5b77e")


def test_the_reference_is_the_published_one() -> None:
    check_published(reference)


@pytest.mark.usefixtures("instructions")
def test_it_is_the_published_one() -> None:
    check_published(compiled)


@pytest.mark.usefixtures("instructions")
def test_it_equals_plain_integers_regardless_of_the_length() -> None:
    for length in LENGTHS[:-1]:
        assert compiled(KEY, DATA[:length]) == reference(KEY, DATA[:length]), length


@pytest.mark.usefixtures("instructions")
def test_pieces_make_the_whole_and_a_digest_may_be_followed_by_more() -> None:
    draw, whole = random.Random(3), compiled(KEY, DATA)
    for _ in range(50):
        running, place = PolyvalKey(KEY).begin(), 0
        while place < len(DATA):
            piece = memoryview(DATA)[place : place + draw.choice([0, 1, 8, 15, 16, 17, 600, 9000])]
            running.update(piece)
            place += piece.nbytes
            if draw.random() < 0.2:
                assert running.digest() == compiled(KEY, DATA[:place])
        assert running.digest() == whole


@pytest.mark.usefixtures("instructions")
def test_no_bit_flips_and_no_blocks_change_places_unnoticed() -> None:
    data = bytearray(DATA[:600])
    found = {compiled(KEY, bytes(data))}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        found.add(compiled(KEY, bytes(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + 8 * len(data)
    assert compiled(KEY, DATA[16:32] + DATA[:16]) != compiled(KEY, DATA[:32])
    assert compiled(KEY[::-1], DATA) != compiled(KEY, DATA)


def test_without_a_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polyval, "library", lambda: None)
    assert not polyval.available()
