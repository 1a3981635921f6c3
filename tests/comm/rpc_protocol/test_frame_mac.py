"""Tags: keyed BLAKE2b, made part by part."""

from __future__ import annotations

import hashlib

import pytest

from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES, FrameMac
from gossamer.errors import MalformedError

KEY = bytes(range(32))


def test_a_tag_is_keyed_blake2b_of_all_parts_so_far() -> None:
    tags = FrameMac(KEY).begin()
    for parts in ([b"header"], [b"header", b"record"], [b"header", b"record", b"hash"]):
        whole = hashlib.blake2b(b"".join(parts), key=KEY, digest_size=TAG_BYTES, person=b"gossamer frame")
        assert tags.add(parts[-1]) == whole.digest()


def test_frames_do_not_run_into_each_other() -> None:
    mac = FrameMac(KEY)
    assert mac.begin().add(b"x") == mac.begin().add(b"x")


def test_a_tag_needs_the_key() -> None:
    assert len({FrameMac(key).begin().add(b"x") for key in (b"", KEY, KEY[::-1])}) == 3


def test_no_bit_of_part_or_tag_can_flip() -> None:
    mac = FrameMac(KEY)
    data = b"header" + mac.begin().add(b"header")
    mac.begin().check(data[:6], data[6:], "header")
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedError, match="header of a frame does not match its tag"):
            mac.begin().check(changed[:6], changed[6:], "header")
