"""Chunk tables: which bytes of a payload, or numbers of a mean, are in which chunk. Pure functions of integers.

All ranks of a group cut alike, since each chunk is an operation of its own below. In a sub-group of some ranks there
are always PART_CHUNKS, perhaps empty ones: other sub-groups, whose tensors may be larger, count operations along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from gossamer.algorithms.collectives import bounds
from gossamer.comm.staging.pinned_arena import ALIGNED_BYTES

CHUNK_BYTES = 2**21  # of what one rank sends: long beside what it takes to begin a copy
SLOT_BYTES = 2**22  # of a chunk together with what comes in for it
PART_CHUNKS = 4

Range = tuple[int, int]  # first, and before which one it ends


def byte_chunks(nbytes: int, rows: int, *, whole: bool) -> list[Range]:
    """The chunks of a message of `nbytes`, of which a slot holds `rows`: the ranges of bytes in each. whole: whether
    all ranks of the group take part. Numbers of up to 64 bytes are not cut apart."""
    each = min(CHUNK_BYTES, SLOT_BYTES // rows) if whole else -(-nbytes // PART_CHUNKS)
    each = max(1, -(-each // ALIGNED_BYTES)) * ALIGNED_BYTES
    count = max(1, -(-nbytes // each)) if whole else PART_CHUNKS
    return [(min(nbytes, place * each), min(nbytes, (place + 1) * each)) for place in range(count)]


def mean_chunks(numel: int, pieces: int, itemsize: int, *, whole: bool) -> list[list[Range]]:
    """The chunks of a mean whose table cuts it in `pieces`: of each piece, the range of numbers in each chunk.

    Every chunk has a part of every piece, so that each number is summed where and in what order it would be without
    chunks: to the same bits. A chunk's parts are in the order of the pieces what tensor_split makes of their sum.
    """
    at = bounds(numel, pieces)
    longest = -(-numel // pieces)
    each = max(1, CHUNK_BYTES // (pieces * itemsize) if whole else -(-longest // PART_CHUNKS))
    count = max(1, -(-longest // each)) if whole else PART_CHUNKS
    return [
        [(min(end, first + place * each), min(end, first + (place + 1) * each)) for first, end in pairwise(at)]
        for place in range(count)
    ]


def spans(sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The bytes from `begin` to `end` of tensors that lie one after another in mind, `sizes` bytes each: which tensor,
    and its first byte and before which one it ends."""
    first = 0
    for place, size in enumerate(sizes):
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            yield place, low - first, high - first
        first += size
