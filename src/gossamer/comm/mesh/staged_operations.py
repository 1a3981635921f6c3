"""Staged operations: the mesh's collectives for tensors of a device, in chunks by way of this machine's memory.

What travels is what the loops know: parts of tables of hops and of messages, in memory of a staging area. Answers have
the bits that the mesh gives on processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from gossamer.base.kernels import scratch_for
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, NeighborAllGather, Payload
from gossamer.comm.mesh.operations import MeshOperations, SimpleOp, Wait, is_here
from gossamer.comm.mesh.program import FORMATS, Ranks, broadcast_program
from gossamer.comm.mesh.staged_means import averaged_chunks, summed_chunks
from gossamer.comm.mesh.staged_messages import StagedMessages
from gossamer.comm.staging.byte_views import ByteViews, dense
from gossamer.comm.staging.chunk_tables import byte_chunks
from gossamer.comm.staging.staged_op import Chunk, StagedOp
from gossamer.comm.staging.staging_area import StagingArea

CPU = torch.device("cpu")


class StagedOperations:
    """One rank's operations by way of a staging area.

    home: the device of this rank; everything: whether all that the group asks is staged, as it must be where any rank
    has a device, since a chunk is an operation of its own to all ranks.
    """

    def __init__(
        self,
        operations: MeshOperations,
        area: StagingArea | None = None,
        *,
        home: torch.device = CPU,
        everything: bool = False,
    ) -> None:
        self._operations, self._area = operations, area or StagingArea()
        self._home, self._everything = home, everything

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether an operation of these tensors is staged: the same on all ranks."""
        return self._everything or not is_here(tensors)

    def ready(self, op: SimpleOp, ranks: Ranks) -> Callable[[], Wait]:
        """Copy what an operation among some ranks of the whole group sends, as far as there is memory; what it returns
        begins it. Its peers are places in `ranks`."""
        match op:
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out, ranks)
            case AllGather(payload):
                return self._gather(payload, ranks, ranks, ranks)
            case AllToAll(parts):
                return self._exchange(parts, ranks)
            case NeighborAllGather(payload):
                told, heard = ([ranks[peer] for peer in peers] for peers in (op.told, op.hears))
                return self._gather(payload, told, heard, ranks)

    def _mean(self, tensor: Tensor, out: Tensor | None, ranks: Ranks) -> Callable[[], Wait]:
        source = dense(tensor)
        flat = _like(source) if out is None or not out.is_contiguous() else out.detach()
        chunks = summed_chunks if source.dtype in FORMATS else averaged_chunks
        staged = self._made(chunks(self._operations, source, flat, ranks), [source])

        def answer() -> Tensor:
            if out is None:
                return flat
            return out if out.is_contiguous() else out.copy_(flat)

        return partial(staged.begin, answer)

    def _gather(self, payload: Payload, tells: Iterable[int], hears: Sequence[int], ranks: Ranks) -> Callable[[], Wait]:
        message = ByteViews.of(payload)
        told = {peer: message for peer in tells if peer != self._operations.rank}
        return self._told(told, message.nbytes, payload, hears, len(ranks), ranks)

    def _exchange(self, parts: Sequence[Payload], ranks: Ranks) -> Callable[[], Wait]:
        messages = dict(zip(ranks, map(ByteViews.of, parts), strict=True))
        own = parts[ranks.index(self._operations.rank)]
        longest = max(message.nbytes for message in messages.values())
        del messages[self._operations.rank]
        return self._told(messages, longest, own, ranks, 2 * len(ranks), ranks)

    def _told(
        self,
        told: dict[int, ByteViews],
        longest: int,
        own: Payload,
        hears: Sequence[int],
        rows: int,
        ranks: Ranks,
    ) -> Callable[[], Wait]:
        """told: by rank; what comes is like `own`, which this rank tells itself. longest: bytes of the longest message
        of any rank; rows: how many a slot holds at most, at any rank."""
        answers = {peer: _empty(own) for peer in hears if peer != self._operations.rank}
        due = {peer: ByteViews.of(payload) for peer, payload in answers.items()}
        messages = StagedMessages(self._operations, told, {peer: each.nbytes for peer, each in due.items()})
        cut = byte_chunks(longest, rows, whole=len(ranks) == self._operations.world)
        staged = self._made([messages.chunk(*each, due) for each in cut], own)
        return partial(staged.begin, lambda: [answers.get(peer, own) for peer in hears])

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Fill `tensors` at all ranks with those of one of them, bit for bit."""
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        copies = [dense(tensor) for tensor in filled]
        message = ByteViews.of(tuple(copies))
        cut = byte_chunks(message.nbytes, 1, whole=True)
        self._made([self._broadcast_chunk(message, *each, source) for each in cut], copies).begin(lambda: None)()
        for tensor, heard in zip(filled, copies, strict=True):
            if heard is not tensor:
                tensor.copy_(heard)

    def _broadcast_chunk(self, message: ByteViews, begin: int, end: int, source: int) -> Chunk:
        rank, everyone = self._operations.rank, self._operations.everyone
        program, parts = broadcast_program((end - begin,), source, rank, everyone)
        moves = message.moves(begin, end, 0)

        def begins(slot: Tensor) -> Wait:
            places = [slot.data_ptr() + part.offset for part in parts]
            return self._operations.run(program, places, slot, lambda: None)

        return Chunk(end - begin, moves, begins, ()) if rank == source else Chunk(end - begin, (), begins, moves)

    def _made(self, chunks: Sequence[Chunk], tensors: Sequence[Tensor]) -> StagedOp:
        elsewhere = (tensor.device for tensor in tensors if not is_here([tensor]))
        return StagedOp(self._area, chunks, next(elsewhere, self._home))


def _empty(like: Payload) -> Payload:
    """Contiguous tensors of these shapes and formats where these lie, with arbitrary contents."""
    return tuple(map(_like, like))


def _like(tensor: Tensor) -> Tensor:
    return scratch_for(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)
