"""Chunk tables: which bytes of a payload, or elements of a mean, are in which chunk. Pure functions of integers.

All ranks of a group cut equally, because each chunk is a separate operation. A subgroup always uses PART_CHUNKS chunks,
some perhaps empty, because other subgroups, with perhaps larger tensors, must count the same number of operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from gossamer.algorithms.collectives import bounds
from gossamer.comm.staging.pinned_arena import ALIGNED_BYTES

CHUNK_BYTES = 2**21  # sent by one rank: long enough to hide the overhead of a copy
SLOT_BYTES = 2**22  # of a chunk together with the received chunks
PART_CHUNKS = 4

Range = tuple[int, int]  # first element, and one past the last


def byte_chunks(nbytes: int, rows: int, *, whole: bool) -> list[Range]:
    """Cut a message of `nbytes` bytes into chunks, and return the byte range of each.

    Args:
        nbytes: Size of the message.
        rows: Number of such messages in a slot.
        whole: Whether all ranks of the group participate.

    Returns:
        Ranges aligned to 64 bytes, so that no element is split.
    """
    each = min(CHUNK_BYTES, SLOT_BYTES // rows) if whole else -(-nbytes // PART_CHUNKS)
    each = max(1, -(-each // ALIGNED_BYTES)) * ALIGNED_BYTES
    count = max(1, -(-nbytes // each)) if whole else PART_CHUNKS
    return [(min(nbytes, place * each), min(nbytes, (place + 1) * each)) for place in range(count)]


def mean_chunks(numel: int, pieces: int, itemsize: int, *, whole: bool) -> list[list[Range]]:
    """Cut a mean into chunks, and return for each chunk the range of elements of each piece.

    Every chunk has a part of every piece, so that each element is summed on the same rank and in the same order as
    without chunks, and the result is bit-identical. The parts of a chunk, in the order of the pieces, are those that
    tensor_split makes of their concatenation.
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
    """Yield the parts of the bytes [begin, end) of concatenated tensors with these sizes, as (tensor, first, end)."""
    first = 0
    for place, size in enumerate(sizes):
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            yield place, low - first, high - first
        first += size
