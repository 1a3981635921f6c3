"""CRC-32 by every instruction set there is: the same as zlib's, whatever the length, the place and what came before."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gossamer.base.kernels import checks
from gossamer.base.kernels import library as native

BYTES = random.Random(5).randbytes(70_000)
LENGTHS = [*range(300), 511, 512, 513, 575, 1000, 4096, checks.SHORT - 1, checks.SHORT, 2**16 + 15]
Checksum = Callable[[memoryview, int], int]


@pytest.fixture(params=[0, 1, 2], ids=["portable", "narrow", "wide"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits the library to an instruction set, and hands it short data as well."""
    library = native.library()
    if library is None:
        pytest.skip("no kernels were compiled here")
    monkeypatch.setattr(checks, "SHORT", 0)
    monkeypatch.setattr(checks, "wanted_kernels", lambda: "native")
    library.gossamer_limit_instructions(request.param)
    yield
    library.gossamer_limit_instructions(2)


def check_equal(of: Checksum) -> None:
    for length in LENGTHS:
        for start in (0, 1, 7):
            data = memoryview(BYTES)[start : start + length]
            for before in (0, 1, 2**32 - 1):
                assert of(data, before) == zlib.crc32(data, before)


@pytest.mark.usefixtures("instructions")
def test_it_equals_zlibs() -> None:
    check_equal(checks.crc32)


@pytest.mark.usefixtures("instructions")
def test_pieces_make_the_whole() -> None:
    draw, data = random.Random(3), memoryview(BYTES)
    for _ in range(50):
        checksum = place = 0
        while place < len(BYTES):
            piece = data[place : place + draw.choice([1, 15, 64, 257, 9000])]
            checksum = checks.crc32(piece, checksum)
            place += piece.nbytes
        assert checksum == zlib.crc32(data)


def last_is_left_out(data: memoryview, before: int) -> int:
    return zlib.crc32(data[:-1], before)


def forgets(data: memoryview, before: int) -> int:
    return zlib.crc32(data)


@pytest.mark.parametrize("broken", [last_is_left_out, forgets], ids=lambda each: each.__name__)
def test_another_one_is_found_out(broken: Checksum) -> None:
    with pytest.raises(AssertionError):
        check_equal(broken)


# -- what it is for --------------------------------------------------------------------------------------


def only_the_sum(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).sum(dtype=np.uint64))


def check_changes_are_noticed(of: Callable[[memoryview], int], nbytes: int) -> None:
    """Bits that flip, and bytes, words and pages that change places."""
    data = np.frombuffer(BYTES, dtype=np.uint8)[:nbytes]
    before, draw = of(data.data), np.random.default_rng(5)
    for _ in range(200):
        changed = data.copy()
        changed[draw.integers(nbytes)] ^= 1 << draw.integers(8)
        assert of(changed.data) != before
    for size in (1, 8, nbytes // 4):
        changed = data.copy()
        changed[:size], changed[-size:] = data[-size:], data[:size]
        assert of(changed.data) != before


@pytest.mark.parametrize("nbytes", [1000, 2**16, 70_000])
def test_it_notices_what_changed(nbytes: int) -> None:
    check_changes_are_noticed(checks.crc32, nbytes)


def test_a_plain_sum_would_not() -> None:
    with pytest.raises(AssertionError):
        check_changes_are_noticed(only_the_sum, 70_000)


def test_without_a_library_it_is_zlibs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "library", lambda: None)
    monkeypatch.delattr(checks, "_CRC32")
    check_equal(checks.crc32)
