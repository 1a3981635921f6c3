"""Staged operations: the mesh's collectives for device tensors, in chunks through host memory.

The messages are those of the compiled loops, with their memory in a staging area. Results are bit-identical to those of
the mesh with CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.algorithms.collectives import Collective
from gossamer.base.kernels import scratch_for
from gossamer.base.layout import bytes_of
from gossamer.base.op_semantics import rank_order_mean
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    NeighborAllGather,
    Payload,
    SimpleOp,
    payload_bytes,
)
from gossamer.comm.mesh.operations import MeshOperations, Wait, is_here
from gossamer.comm.mesh.program import FORMATS, Ranks, broadcast_program, form_of, mean_program, straight_program
from gossamer.comm.packing import dense
from gossamer.comm.staging.chunk_tables import Range, byte_chunks, mean_chunks, spans
from gossamer.comm.staging.pinned_arena import ALIGNED_BYTES
from gossamer.comm.staging.staging_area import Chunk, Move, StagedOp, StagingArea

Likes = Sequence[tuple[int, Payload]]  # sender and layout of each received payload, in the order of the result
Parts = Mapping[int, tuple[int, int]]  # by rank: offset and length of a part in a slot, in bytes


class StagedMessages:
    """Messages of one operation. outgoing: the message to each rank; incoming: number of bytes from each."""

    def __init__(
        self, operations: MeshOperations, outgoing: Mapping[int, ByteViews], incoming: Mapping[int, int]
    ) -> None:
        self._operations, self._outgoing, self._incoming = operations, outgoing, incoming
        self._distinct = list({id(message): message for message in outgoing.values()}.values())

    def chunk(self, begin: int, end: int, answers: Mapping[int, ByteViews]) -> Chunk:
        """Build the chunk with the bytes [begin, end) of all messages. answers: destinations of received messages."""
        layout = SlotLayout()
        inward: list[Move] = []
        sent_at: dict[int, tuple[int, int]] = {}
        for message in self._distinct:
            length = message.length(begin, end)
            sent_at[id(message)] = layout.add(length), length
            inward += message.moves(begin, end, sent_at[id(message)][0])
        outgoing = {peer: sent_at[id(message)] for peer, message in self._outgoing.items()}
        lengths = {peer: max(0, min(nbytes, end) - begin) for peer, nbytes in self._incoming.items()}
        incoming = {peer: (layout.add(length), length) for peer, length in lengths.items()}
        outward = [move for peer, each in answers.items() for move in each.moves(begin, end, incoming[peer][0])]
        return Chunk(layout.nbytes, inward, partial(straight, self._operations, outgoing, incoming), outward)


class SlotLayout:
    """Allocates aligned parts of a slot, one after another."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, length: int) -> int:
        """Return the offset of another part."""
        place = -(-self.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.nbytes = place + length
        return place


def straight(operations: MeshOperations, outgoing: Parts, incoming: Parts, slot: Tensor) -> Wait:
    """Begin to send bytes of a slot to other ranks, and to receive theirs into the slot."""
    to, of = ([parts.get(peer, (0, 0)) for peer in operations.everyone] for parts in (outgoing, incoming))
    sizes = tuple(length for _, length in to), tuple(length for _, length in of)
    program = straight_program(*sizes, form_of("staged", max(map(max, sizes))))
    places = [slot.data_ptr() + place for place, _ in (*to, *of)]
    return operations.run(program, places, slot, lambda: None)


def summed_chunks(operations: MeshOperations, source: Tensor, flat: Tensor, ranks: Ranks) -> list[Chunk]:
    """Chunks for the mean of `source` in `flat`, both contiguous, of a format that the loops sum, over `ranks`."""
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
    """Chunks for the mean of `source` in `flat`, both contiguous, of any format; bit-identical on all ranks."""
    cut = byte_chunks(source.nbytes, len(ranks), whole=len(ranks) == operations.world)
    return [_averaged_chunk(operations, source, flat, ranks, *each) for each in cut]


def _averaged_chunk(
    operations: MeshOperations, source: Tensor, flat: Tensor, ranks: Ranks, begin: int, end: int
) -> Chunk:
    layout, length = SlotLayout(), end - begin
    at = {peer: (layout.add(length), length) for peer in ranks}
    local = at[operations.rank]
    others = [peer for peer in ranks if peer != operations.rank]

    def begins(slot: Tensor) -> Wait:
        arrived = straight(operations, dict.fromkeys(others, local), {peer: at[peer] for peer in others}, slot)

        def average() -> None:
            arrived()
            rows = [slot[place : place + length].view(source.dtype) for place, _ in at.values()]
            rows[ranks.index(operations.rank)].copy_(rank_order_mean(rows))

        return average

    def moves(tensor: Tensor) -> list[Move]:
        return [(bytes_of(tensor)[begin:end], local[0])] if length else []

    return Chunk(layout.nbytes, moves(source), begins, moves(flat))


CPU = torch.device("cpu")


class StagedOperations:
    """One rank's operations through a staging area.

    Args:
        operations: The mesh's operations.
        area: The staging area.
        home: Device of this rank.
        everything: Whether all operations of the group are staged. Required if any rank has a device, because each
            chunk is a separate operation on all ranks.
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
        self._home, self.everything = home, everything

    def ready(self, op: SimpleOp, ranks: Ranks) -> Callable[[], Wait]:
        """Copy the data that an operation sends, as far as there is memory. The returned function begins the operation.
        Peers in `op` are indices into `ranks`."""
        match op:
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out, ranks)
            case AllGather(payload):
                likes = op.meta_answer(len(ranks), ranks.index(self._operations.rank))
                return self._gather(payload, ranks, list(zip(ranks, likes, strict=True)), ranks)
            case AllToAll():
                return self._exchange(op, ranks)
            case NeighborAllGather(payload):
                outgoing, received = ([ranks[peer] for peer in peers] for peers in (op.receivers, op.senders))
                return self._gather(payload, outgoing, [(peer, payload) for peer in received], ranks)

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

    def _gather(self, payload: Payload, receivers: Iterable[int], likes: Likes, ranks: Ranks) -> Callable[[], Wait]:
        message = ByteViews.of(payload)
        outgoing = {peer: message for peer in receivers if peer != self._operations.rank}
        longest = max([message.nbytes, *(payload_bytes(like) for _, like in likes if like is not payload)])
        return self._outgoing(outgoing, longest, payload, likes, len(ranks), ranks)

    def _exchange(self, op: AllToAll, ranks: Ranks) -> Callable[[], Wait]:
        place = ranks.index(self._operations.rank)
        messages = dict(zip(ranks, map(ByteViews.of, op.parts), strict=True))
        likes = list(zip(ranks, op.meta_answer(len(ranks), place), strict=True))
        largest = (
            [message.nbytes for message in messages.values()] if op.forms is None else map(payload_bytes, op.forms)
        )
        longest = max(largest)
        del messages[self._operations.rank]
        return self._outgoing(messages, longest, op.parts[place], likes, 2 * len(ranks), ranks)

    def _outgoing(
        self,
        outgoing: dict[int, ByteViews],
        longest: int,
        own: Payload,
        likes: Likes,
        rows: int,
        ranks: Ranks,
    ) -> Callable[[], Wait]:
        """outgoing: messages by rank; own: this rank's payload; longest: bytes of the longest
        message of any rank; rows: most messages in a slot at any rank."""
        answers = {peer: _empty(like, own) for peer, like in likes if peer != self._operations.rank}
        due = {peer: ByteViews.of(payload) for peer, payload in answers.items()}
        messages = StagedMessages(self._operations, outgoing, {peer: each.nbytes for peer, each in due.items()})
        cut = byte_chunks(longest, rows, whole=len(ranks) == self._operations.world)
        staged = self._made([messages.chunk(*each, due) for each in cut], own)
        return partial(staged.begin, lambda: [answers.get(peer, own) for peer, _ in likes])

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Copy the tensors of rank `source` to all ranks, bit for bit."""
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        copies = [dense(tensor) for tensor in filled]
        message = ByteViews.of(tuple(copies))
        cut = byte_chunks(message.nbytes, 1, whole=True)
        self._made([self._broadcast_chunk(message, *each, source) for each in cut], copies).begin(lambda: None)()
        for tensor, copy in zip(filled, copies, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

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


def _empty(like: Payload, own: Payload) -> Payload:
    """Return uninitialized contiguous tensors with the shapes, dtypes and devices of these; on the device of `own` if
    `like` has no data."""
    if like is own or not any(tensor.is_meta for tensor in like):
        return tuple(map(_like, like))
    device = own[0].device
    return tuple(scratch_for(each.numel(), each.dtype, device).view(each.shape) for each in like)


def _like(tensor: Tensor) -> Tensor:
    return scratch_for(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)


# -- payloads as bytes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ByteViews:
    """views: the bytes of each tensor, uint8 of shape (n,), on its device."""

    views: tuple[Tensor, ...]

    @classmethod
    def of(cls, payload: Payload) -> ByteViews:
        """View tensors as bytes; non-contiguous tensors are copied."""
        return cls(tuple(bytes_of(dense(tensor)) for tensor in payload))

    @property
    def nbytes(self) -> int:
        return sum(view.numel() for view in self.views)

    def length(self, begin: int, end: int) -> int:
        """Number of its bytes in the range [begin, end)."""
        return max(0, min(self.nbytes, end) - begin)

    def moves(self, begin: int, end: int, at: int) -> list[Move]:
        """Moves of the bytes [begin, end), to or from offset `at` of a slot."""
        found: list[Move] = []
        for place, low, high in spans([view.numel() for view in self.views], begin, end):
            found.append((self.views[place][low:high], at))
            at += high - low
        return found
