"""Programs: what one rank does for an operation, message by message, as rows for the compiled mesh to run.

A row sends a piece of memory to a peer, or takes what a peer sends, in the piece's place or added to it. Pure functions
of integers; every rank makes the rows that fit the others'.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from gossamer.algorithms.collectives import Broadcast, Collective, Does, bounds
from gossamer.base import rng

BYTES, FORMATS = 0, {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}  # kernels-src/sums.hpp
CODES = {Does.SEND: 0, Does.ADD: 1, Does.KEEP: 2}  # Does in kernels-src/mesh.hpp

Ranks = tuple[int, ...]
Row = tuple[int, int, int, int, int]  # what it does, the peer, the piece, after how many changes of it, the tag


@dataclass(frozen=True)
class Program:
    """One rank's part in an operation."""

    rows: ctypes.Array[ctypes.c_int32]  # five numbers each, as in Row
    sizes: ctypes.Array[ctypes.c_int64]  # of the pieces, in bytes
    offsets: tuple[int, ...]  # where the pieces lie, one after another
    form: int  # a hash of what is the same on all ranks, by which a rank that issues another operation is found out
    format: int = BYTES  # of the numbers, in FORMATS
    divisor: float = 1.0  # of sums


@lru_cache(maxsize=1024)
def mean_program(collective: Collective, numel: int, dtype: torch.dtype, rank: int, ranks: Ranks) -> Program:
    """The mean of `numel` numbers of each of `ranks`, by a collective's table of hops. rank: this one's place there."""
    count = collective.pieces(len(ranks))
    lengths = [(numel // count + (piece < numel % count)) * dtype.itemsize for piece in range(count)]
    form = form_of("mean", collective, numel, dtype, ranks)
    rows = table_rows(collective, rank, ranks)
    return _program(rows, lengths, tuple(accumulate(lengths[:-1], initial=0)), form, FORMATS[dtype], float(len(ranks)))


def table_rows(collective: Collective, rank: int, ranks: Ranks) -> list[Row]:
    """A table of hops, piece by piece. What is taken in one round makes one change of its piece."""
    world = len(ranks)
    pieces = collective.pieces(world)
    changes = [0] * pieces  # in the rounds before this one
    rows: list[Row] = []
    now, changed = 0, set[int]()
    for hop in collective.hops(rank, world):
        if hop.round != now:
            for piece in changed:
                changes[piece] += 1
            now, changed = hop.round, set()
        for piece in range(hop.first, hop.stop):
            rows.append((CODES[hop.does], ranks[hop.peer], piece, changes[piece], hop.round * pieces + piece))
            if hop.does != Does.SEND:
                changed.add(piece)
    return rows


@dataclass(frozen=True)
class Segment:
    """Bytes of one of several tensors: `nbytes` of number `tensor`, from `offset` on."""

    tensor: int
    offset: int
    nbytes: int


@lru_cache(maxsize=256)
def broadcast_program(sizes: tuple[int, ...], source: int, rank: int, ranks: Ranks) -> tuple[Program, list[Segment]]:
    """Tensors of `sizes` bytes from `source` to all of `ranks`; and the segments that are the program's pieces.

    rank, source: their places among `ranks`.
    """
    table = Broadcast(source=source)
    pieces = table.pieces(len(ranks))
    parts = segments(sizes, pieces)
    found = [segment for part in parts for segment in part]
    first = list(accumulate(map(len, parts), initial=0))
    rows = [
        (does, peer, first[piece] + place, stage, tag // pieces * len(found) + first[piece] + place)
        for does, peer, piece, stage, tag in table_rows(table, rank, ranks)
        for place in range(len(parts[piece]))
    ]
    form = form_of("broadcast", sizes, source, ranks)
    return _program(rows, [segment.nbytes for segment in found], (), form), found


def segments(sizes: Sequence[int], pieces: int) -> list[list[Segment]]:
    """The segments of each of equal pieces of tensors that follow one another in mind, `sizes` bytes each."""
    at = bounds(sum(sizes), pieces)
    begins = list(accumulate(sizes, initial=0))
    found: list[list[Segment]] = [[] for _ in range(pieces)]
    for tensor, (begin, end) in enumerate(pairwise(begins)):
        for piece in range(bisect_right(at, begin) - 1, pieces):
            low, high = max(begin, at[piece]), min(end, at[piece + 1])
            if low < high:
                found[piece].append(Segment(tensor, low - begin, high - low))
            if at[piece + 1] >= end:
                break
    return found


@lru_cache(maxsize=1024)
def straight_program(told: tuple[int, ...], heard: tuple[int, ...], form: int) -> Program:
    """Bytes straight to their receivers. told[j], heard[j]: how many go to and come from rank j.

    Pieces: what is told to every rank, then what is heard of every rank; places are given with each call.
    """
    world = len(told)
    rows = [(CODES[Does.SEND], peer, peer, 0, 0) for peer in range(world) if told[peer]]
    rows += [(CODES[Does.KEEP], peer, world + peer, 0, 0) for peer in range(world) if heard[peer]]
    return _program(rows, [*told, *heard], (), form)


@lru_cache(maxsize=4096)
def form_of(*what: object) -> int:
    """32 bits of what is the same on all ranks."""
    return rng.address(repr(what)) & 0xFFFFFFFF


def _program(
    rows: Sequence[Row],
    sizes: Sequence[int],
    offsets: tuple[int, ...],
    form: int,
    kind: int = BYTES,
    divisor: float = 1,
) -> Program:
    numbers = [number for row in rows for number in row]
    return Program(
        rows=(ctypes.c_int32 * len(numbers))(*numbers),
        sizes=(ctypes.c_int64 * len(sizes))(*sizes),
        offsets=offsets,
        form=form,
        format=kind,
        divisor=divisor,
    )
