"""Programs: one rank's part of an operation, message by message, as rows for the compiled mesh.

A row sends a piece of memory to a peer, or receives one from it and stores or adds it. These are pure functions of
integers; the rows of all ranks match each other.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from gossamer.algorithms.collectives import Broadcast, Collective, Does, HubAllGather, HubBroadcast, bounds
from gossamer.base import rng

BYTES, FORMATS = 0, {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}  # kernels-src/sums.hpp
CODES = {Does.SEND: 0, Does.ADD: 1, Does.KEEP: 2}  # Does in kernels-src/mesh.hpp

Ranks = tuple[int, ...]
Row = tuple[int, int, int, int, int]  # (action, peer, piece, required number of changes of the piece, tag)


@dataclass(frozen=True)
class Program:
    """One rank's part of an operation."""

    rows: ctypes.Array[ctypes.c_int32]  # five numbers each, as in Row
    sizes: ctypes.Array[ctypes.c_int64]  # of the pieces, in bytes
    offsets: tuple[int, ...]  # of the pieces in one contiguous buffer, in bytes
    form: int  # hash of the values that are equal on all ranks; detects a rank that issues another operation
    format: int = BYTES  # of the elements, in FORMATS
    divisor: float = 1.0  # of sums


@lru_cache(maxsize=1024)
def mean_program(collective: Collective, numel: int, dtype: torch.dtype, rank: int, ranks: Ranks) -> Program:
    """Program for the mean of `numel` elements over `ranks`. rank: index of this rank in `ranks`."""
    count = collective.pieces(len(ranks))
    lengths = [(numel // count + (piece < numel % count)) * dtype.itemsize for piece in range(count)]
    form = form_of("mean", collective, numel, dtype, ranks)
    rows = table_rows(collective, rank, ranks)
    return _program(rows, lengths, tuple(accumulate(lengths[:-1], initial=0)), form, FORMATS[dtype], float(len(ranks)))


def table_rows(collective: Collective, rank: int, ranks: Ranks) -> list[Row]:
    """Convert a table of hops to rows. All receives of a piece in one round count as one change."""
    world = len(ranks)
    pieces = collective.pieces(world)
    changes = [0] * pieces  # in earlier rounds
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
    """A range of bytes in one of several tensors: `nbytes` bytes of tensor `tensor` from `offset`."""

    tensor: int
    offset: int
    nbytes: int


@lru_cache(maxsize=256)
def broadcast_program(
    sizes: tuple[int, ...], source: int, rank: int, ranks: Ranks, hub: int | None = None
) -> tuple[Program, list[Segment]]:
    """Program that broadcasts tensors of `sizes` bytes, and the segments that are its pieces.

    Args:
        sizes: Bytes of each tensor.
        source: Index of the sender in `ranks`.
        rank: Index of this rank in `ranks`.
        ranks: The participants.
        hub: Index of the rank that copies for all; None without one.
    """
    table = Broadcast(source=source) if hub is None else HubBroadcast(source=source, hub=hub)
    pieces = table.pieces(len(ranks))
    parts = segments(sizes, pieces)
    found = [segment for part in parts for segment in part]
    first = list(accumulate(map(len, parts), initial=0))
    rows = [
        (does, peer, first[piece] + place, stage, tag // pieces * len(found) + first[piece] + place)
        for does, peer, piece, stage, tag in table_rows(table, rank, ranks)
        for place in range(len(parts[piece]))
    ]
    form = form_of("broadcast", sizes, source, ranks, hub)
    return _program(rows, [segment.nbytes for segment in found], (), form), found


def segments(sizes: Sequence[int], pieces: int) -> list[list[Segment]]:
    """Split the concatenation of tensors of `sizes` bytes into equal pieces; return the segments of each piece."""
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
def hub_gather_program(sizes: tuple[int, ...], hub: int, rank: int, ranks: Ranks) -> Program:
    """Program of an all-gather by a hub. The pieces are the payloads of all ranks; their addresses are given per call.

    Args:
        sizes: Bytes of each rank's payload.
        hub: Index of the hub in `ranks`.
        rank: Index of this rank in `ranks`.
        ranks: The participants.
    """
    rows = [row for row in table_rows(HubAllGather(hub=hub), rank, ranks) if sizes[row[2]]]
    return _program(rows, sizes, (), form_of("gather by a hub", sizes, hub, ranks))


@lru_cache(maxsize=1024)
def straight_program(outgoing: tuple[int, ...], received: tuple[int, ...], form: int) -> Program:
    """Program that sends bytes directly to their receivers.

    The pieces are the messages to every rank, then the messages from every rank. Their addresses are given per call.

    Args:
        outgoing: Bytes to send to each rank.
        received: Bytes to receive from each rank.
        form: Hash of the operation.
    """
    world = len(outgoing)
    rows = [(CODES[Does.SEND], peer, peer, 0, 0) for peer in range(world) if outgoing[peer]]
    rows += [(CODES[Does.KEEP], peer, world + peer, 0, 0) for peer in range(world) if received[peer]]
    return _program(rows, [*outgoing, *received], (), form)


@lru_cache(maxsize=4096)
def form_of(*what: object) -> int:
    """Hash values that are equal on all ranks to 32 bits."""
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
