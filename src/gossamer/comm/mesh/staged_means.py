"""Staged means: chunks of a mean, by a table of hops; or gathered, and averaged in this machine's memory.

Every chunk of a table's mean has a part of every piece, so that the bits are those of the whole mean on processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from gossamer.algorithms.collectives import Collective
from gossamer.base.op_semantics import rank_order_mean
from gossamer.comm.mesh.operations import MeshOperations, Wait
from gossamer.comm.mesh.program import Ranks, mean_program
from gossamer.comm.mesh.staged_messages import SlotLayout, straight
from gossamer.comm.staging.byte_views import bytes_of
from gossamer.comm.staging.chunk_tables import Range, byte_chunks, mean_chunks
from gossamer.comm.staging.staged_op import Chunk
from gossamer.comm.staging.staging_area import Move


def summed_chunks(operations: MeshOperations, source: Tensor, flat: Tensor, ranks: Ranks) -> list[Chunk]:
    """The mean of `source` in `flat`, both contiguous, of a format that the loops sum. ranks: those that take part."""
    table = operations.pick(source.nbytes, source.dtype.itemsize, ranks)
    whole = len(ranks) == operations.world
    cut = mean_chunks(source.numel(), table.pieces(len(ranks)), source.dtype.itemsize, whole=whole)
    return [_summed_chunk(operations, source, flat, ranks, table, ranges) for ranges in cut]


def _summed_chunk(
    operations: MeshOperations,
    source: Tensor,
    flat: Tensor,
    ranks: Ranks,
    table: Collective,
    ranges: Sequence[Range],
) -> Chunk:
    itemsize = source.dtype.itemsize
    numel = sum(end - begin for begin, end in ranges)
    program = mean_program(table, numel, source.dtype, ranks.index(operations.rank), ranks)
    at = list(accumulate(((end - begin) * itemsize for begin, end in ranges), initial=0))

    def moves(tensor: Tensor) -> list[Move]:
        joint, places = bytes_of(tensor), zip(ranges, at, strict=False)
        return [(joint[begin * itemsize : end * itemsize], place) for (begin, end), place in places if begin < end]

    def begin(slot: Tensor) -> Wait:
        places = [slot.data_ptr() + offset for offset in program.offsets]
        return operations.run(program, places, slot, lambda: None)

    return Chunk(at[-1], moves(source), begin, moves(flat))


def averaged_chunks(operations: MeshOperations, source: Tensor, flat: Tensor, ranks: Ranks) -> list[Chunk]:
    """The mean of `source` in `flat`, both contiguous, of any format: the same bits at all ranks, whatever they are."""
    cut = byte_chunks(source.nbytes, len(ranks), whole=len(ranks) == operations.world)
    return [_averaged_chunk(operations, source, flat, ranks, *each) for each in cut]


def _averaged_chunk(
    operations: MeshOperations, source: Tensor, flat: Tensor, ranks: Ranks, begin: int, end: int
) -> Chunk:
    layout, length = SlotLayout(), end - begin
    at = {peer: (layout.add(length), length) for peer in ranks}
    mine = at[operations.rank]
    others = [peer for peer in ranks if peer != operations.rank]

    def begins(slot: Tensor) -> Wait:
        arrived = straight(operations, dict.fromkeys(others, mine), {peer: at[peer] for peer in others}, slot)

        def average() -> None:
            arrived()
            rows = [slot[place : place + length].view(source.dtype) for place, _ in at.values()]
            rows[ranks.index(operations.rank)].copy_(rank_order_mean(rows))

        return average

    def moves(tensor: Tensor) -> list[Move]:
        return [(bytes_of(tensor)[begin:end], mine[0])] if length else []

    return Chunk(layout.nbytes, moves(source), begins, moves(flat))
