from __future__ import annotations

import pytest

from gossamer.observe.exporters.crc32c import crc32c, masked


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ],
    ids=["empty", "zeros", "ones", "rising", "check value"],
)  # fmt: skip
def test_it_is_castagnolis(data: bytes, crc: int) -> None:
    """Vectors of RFC 3720 B.4, and the usual check value."""
    assert crc32c(data) == crc


def test_the_mask_turns_and_shifts_within_32_bits() -> None:
    assert masked(0) == 0xA282EAD8
    assert masked(0xFFFFFFFF) == 0xA282EAD7
    assert masked(0x00018000) == 0xA282EADB
