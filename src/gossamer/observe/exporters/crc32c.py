"""CRC-32C (Castagnoli) and its masked form, which TensorBoard's files hold. source: RFC 3720 B.4; TFRecord's format."""

from __future__ import annotations

POLYNOMIAL = 0x82F63B78  # reflected


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_entry, range(256)))


def crc32c(data: bytes) -> int:
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """Rotated and shifted, because a CRC of data that hold their own CRC finds less."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
