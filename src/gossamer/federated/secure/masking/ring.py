"""Ring: integers modulo a power of two that no sum of a cohort can leave, and their bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.errors import MalformedError, require

Integers = npt.NDArray[np.int64]
RingVector = npt.NDArray[Any]  # of the ring's unsigned dtype
ByteVector = npt.NDArray[np.uint8]

MOST_BITS = 64


@dataclass(frozen=True)
class SumRing:
    """Integers modulo 2^width, held in the smallest unsigned numbers that have as many bits.

    A summand lies between -(2^(bits-1) - 1) and 2^(bits-1) - 1, so a sum of `summands` of them is at most
    summands (2^(bits-1) - 1) in size: width is the bits of that and one for the sign, bits + ceil(log2(summands)) at
    most. A sum can not overflow, whoever leaves.
    """

    bits: int
    summands: int

    def __post_init__(self) -> None:
        require(self.bits >= 2 and self.summands >= 1, f"{self.summands} summands of {self.bits} bits have no sum")
        require(self.width <= MOST_BITS, f"sums of {self.summands} numbers of {self.bits} bits leave 64 bits")

    @property
    def largest(self) -> int:
        """What a summand is at most in size."""
        return (1 << (self.bits - 1)) - 1

    @property
    def width(self) -> int:
        return 1 + (self.summands * self.largest).bit_length()

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.width <= 16 else np.uint32 if self.width <= 32 else np.uint64)

    def wrapped(self, integers: Integers) -> RingVector:
        """(n,) summands as members of the ring. Raises ValueError for one that is too large."""
        if len(integers) and max(-int(integers.min()), int(integers.max())) > self.largest:
            raise ValueError(f"a summand is above {self.largest} in size, so sums could overflow")
        return integers.astype(self.dtype)

    def centered(self, total: RingVector) -> Integers:
        """(n,) the sums that members of the ring stand for, between -2^(width-1) and 2^(width-1)."""
        shift = MOST_BITS - self.width
        return (total.astype(np.uint64) << np.uint64(shift)).view(np.int64) >> np.int64(shift)

    def wire_bytes(self, count: int) -> int:
        """Of so many packed members: width / 8 each, rounded up once for each bit that does not fill a byte."""
        whole, rest = divmod(self.width, 8)
        return whole * count + rest * -(-count // 8)

    def packed(self, vector: RingVector) -> ByteVector:
        """The lowest `width` bits of each member: whole bytes plane by plane, then the bits that are left likewise."""
        whole, rest = divmod(self.width, 8)
        planes = np.ascontiguousarray(vector).view(np.uint8).reshape(len(vector), vector.itemsize)
        out = np.empty(self.wire_bytes(len(vector)), np.uint8)
        for plane in range(whole):
            out[plane * len(vector) : (plane + 1) * len(vector)] = planes[:, plane]
        place = whole * len(vector)
        for bit in range(rest):
            packed = np.packbits(planes[:, whole] >> bit & 1)
            out[place : place + len(packed)] = packed
            place += len(packed)
        return out

    def unpacked(self, packed: ByteVector, count: int) -> RingVector:
        """`count` members of their bytes. Raises MalformedError where these are not as many."""
        if packed.dtype != np.uint8 or packed.shape != (self.wire_bytes(count),):
            raise MalformedError(
                f"{count} masked numbers of {self.width} bits are {self.wire_bytes(count)} bytes, and "
                f"{packed.shape} of {packed.dtype} came"
            )
        whole, rest = divmod(self.width, 8)
        vector = np.zeros(count, self.dtype)
        planes = vector.view(np.uint8).reshape(count, vector.itemsize)
        for plane in range(whole):
            planes[:, plane] = packed[plane * count : (plane + 1) * count]
        place, step = whole * count, -(-count // 8)
        for bit in range(rest):
            planes[:, whole] |= np.unpackbits(packed[place : place + step], count=count) << bit
            place += step
        return vector
