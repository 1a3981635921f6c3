"""Tensor hashes: tell whether ranks begin with the same numbers, on all cores and near the speed of memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch import Tensor

from gossamer.base.kernels.crc import crc32
from gossamer.train.checkpoint.pytree import flat_bytes

CHUNK_BYTES = 2**22
HASH_BYTES = 8
MOST_THREADS = 8  # as many as memory can feed


def tensor_hashes(tensors: Iterable[Tensor], threads: int | None = None) -> list[str]:
    """A hash of each tensor's elements in row-major order; one in 2^32 unlike tensors, at most, has an equal one.

    h(x) = blake2b(size, crc(chunk 1), crc(chunk 2), ...)    chunks of 4 MiB, each a CRC-32
    law: the same with any number of threads; tensors that differ in up to 32 neighboring bits have unlike hashes

    threads: None for as many as there are cores, at most 8.
    """
    listed = [flat_bytes(tensor) for tensor in tensors]
    pieces = (chunk for flat in listed for chunk in flat.split(CHUNK_BYTES))
    wanted = min(_cores(), MOST_THREADS) if threads is None else threads
    few = wanted == 1 or sum(len(flat) for flat in listed) <= CHUNK_BYTES
    with nullcontext() if few else ThreadPoolExecutor(wanted, "gossamer-hash") as pool:
        checksums: Iterator[int] = iter((map if pool is None else pool.map)(_checksum, pieces))
        return [_joined(len(flat), list(islice(checksums, -(-len(flat) // CHUNK_BYTES) or 1))) for flat in listed]


def _checksum(chunk: Tensor) -> int:
    numbers: Any = chunk.cpu().numpy()
    return crc32(memoryview(numbers))


def _joined(nbytes: int, checksums: Sequence[int]) -> str:
    running = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=HASH_BYTES)
    for checksum in checksums:
        running.update(checksum.to_bytes(4, "little"))
    return running.hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
