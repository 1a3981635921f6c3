"""Collective calls: one rank's request to a process set, with the part that must be the same on every rank.

Tensors are torch's; a front end of another framework converts its arrays first. Reductions are computed in float64, or
int64 for integers, in the order of ranks, so every rank receives the same bits.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.base.layout import dtype_name, dtype_of
from gossamer.base.ops import AllGather, AllToAll, CollectiveOp
from gossamer.base.runner import broadcast, run_script
from gossamer.base.transport import Transport

Tensors = tuple[Tensor, ...]
Answer = Any  # of one call, before `finish`


class ReductionOp(enum.Enum):
    """How values of several ranks are combined."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveCall(ABC):
    """One rank's call. finish: makes the call's result of its answer, on the thread that communicates."""

    kind: ClassVar[str]
    tensors: Tensors = ()
    finish: Callable[[Answer], Any] = lambda answer: answer

    @abstractmethod
    def form(self) -> list[Any]:
        """The part that must be the same on every rank, as JSON."""

    def sizes(self) -> list[int]:
        """Numbers of rows or bytes, which may differ between ranks. Every rank receives those of all ranks."""
        return []

    @abstractmethod
    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        """Communicate. rank_sizes: `sizes()` of all ranks."""


def described(tensor: Tensor, shape: Sequence[int]) -> list[Any]:
    return [dtype_name(tensor.dtype), list(shape), tensor.device.type]


def flat(tensor: Tensor) -> Tensor:
    """The entries in one dimension, on the CPU; in the tensor's own memory where it has them so."""
    own = tensor.detach().cpu().contiguous()
    return own.as_strided((own.numel(),), (1,))  # one element is contiguous with any stride


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def from_bytes(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries of a part of a message, which may begin at any byte."""
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """In the tensor's dtype; integers are scaled in float64 and truncated."""
    if factor == 1.0:
        return tensor
    return tensor * factor if tensor.is_floating_point() else (tensor.double() * factor).to(tensor.dtype)


def combined(values: Sequence[Tensor], how: ReducingCall) -> Tensor:
    """The reduction of one part, computed in float64 or int64 and rounded once to its dtype. Means of integers are
    truncated."""
    kind = values[0].dtype
    wide = torch.float64 if kind.is_floating_point else torch.int64

    def given() -> Iterator[Tensor]:
        return (scaled(value.to(wide), how.prescale) for value in values)

    match how.op:
        case ReductionOp.AVERAGE:
            found = (_mean if kind.is_floating_point else _truncated_mean)(given, len(values))
        case ReductionOp.MIN:
            found = reduce(torch.minimum, given())
        case ReductionOp.MAX:
            found = reduce(torch.maximum, given())
        case ReductionOp.PRODUCT:
            found = reduce(torch.mul, given())
        case _:
            found = reduce(torch.add, given())
    return scaled(found, how.postscale).to(kind)


def _mean(given: Callable[[], Iterator[Tensor]], world: int) -> Tensor:
    """The mean of numbers, which is finite even if their sum is too large for float64."""
    mean = reduce(torch.add, given()) / world
    if mean.isfinite().all():
        return mean
    power = 2.0 ** (world - 1).bit_length()  # a division by it changes no bits of a large number
    return torch.where(mean.isfinite(), mean, reduce(torch.add, (each / power for each in given())) / world * power)


def _truncated_mean(given: Callable[[], Iterator[Tensor]], world: int) -> Tensor:
    """The mean of integers, also if their sum is too large for int64."""
    rest = reduce(torch.add, (each % world for each in given()))
    mean = reduce(torch.add, (each // world for each in given())) + rest // world
    return mean + ((mean < 0) & (rest % world > 0))  # it was rounded down


def _reduced(vector: Tensor, how: ReducingCall, world: int) -> Generator[CollectiveOp, Any, Tensor]:
    """Each rank reduces one part and sends it to all."""
    if not len(vector):
        return vector
    share = -(-len(vector) // world)
    padded = vector.new_zeros(share * world)
    padded[: len(vector)] = vector
    payloads = yield AllToAll(tuple((as_bytes(part),) for part in padded.split(share)))
    mine = combined([part.view(vector.dtype) for (part,) in payloads], how)
    found = yield AllGather((as_bytes(mine),))
    return torch.cat([part.view(vector.dtype) for (part,) in found])[: len(vector)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReducingCall(CollectiveCall):
    """Reduce tensors of equal shapes over the ranks; they are multiplied by `prescale` before and `postscale` after."""

    op: ReductionOp
    prescale: float = 1.0
    postscale: float = 1.0

    def form(self) -> list[Any]:
        about = [described(tensor, tensor.shape) for tensor in self.tensors]
        return [about, self.op.value, self.prescale, self.postscale]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllReduceCall(ReducingCall):
    """Reduce each tensor over the ranks. Answer: tensors of the same shapes, on the CPU."""

    kind = "allreduce"

    @classmethod
    def zeros(cls, form: list[Any]) -> AllReduceCall:
        """The call of a rank that has joined: zeros."""
        about, op, prescale, postscale = form
        tensors = tuple(torch.zeros(shape, dtype=dtype_of(dtype), device="cpu") for dtype, shape, _ in about)
        return cls(tensors=tensors, op=ReductionOp(op), prescale=prescale, postscale=postscale)

    @property
    def fuses_with(self) -> tuple[Any, ...] | None:
        """Calls of equal keys travel as one; None: this one travels alone."""
        kinds = {tensor.dtype for tensor in self.tensors}
        return (*kinds, self.op, self.prescale, self.postscale) if len(kinds) == 1 else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        return fused_answers([self], transport)[0]


def fused_answers(calls: Sequence[AllReduceCall], transport: Transport) -> list[Answer]:
    """The answers of calls that have the same operation and factors; each dtype travels as one vector."""
    first = calls[0]
    pieces = [(place, tensor) for place, call in enumerate(calls) for tensor in call.tensors]
    found: dict[int, Tensor] = {}
    for kind in dict.fromkeys(tensor.dtype for _, tensor in pieces):
        numbers = [number for number, (_, tensor) in enumerate(pieces) if tensor.dtype == kind]
        vectors = [flat(pieces[number][1]) for number in numbers]
        reduced = run_script(_reduced(torch.cat(vectors), first, transport.world), transport).result
        for number, part in zip(numbers, reduced.split([len(vector) for vector in vectors]), strict=True):
            found[number] = part.view(pieces[number][1].shape).clone()
    answers: list[list[Tensor]] = [[] for _ in calls]
    for number, (place, _) in enumerate(pieces):
        answers[place].append(found[number])
    return answers


@dataclass(frozen=True, kw_only=True, eq=False)
class AllGatherCall(CollectiveCall):
    """Concatenate each tensor of all ranks along the first dimension. Sizes of that dimension may differ.

    Answer: for each tensor the concatenation and its size on each rank.
    """

    kind = "allgather"

    def form(self) -> list[Any]:
        return [described(tensor, tensor.shape[1:]) for tensor in self.tensors]

    def sizes(self) -> list[int]:
        return [len(tensor) for tensor in self.tensors]

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        rows_of = [[sizes[number] for sizes in rank_sizes] for number in range(len(self.tensors))]
        padded = [_padded(tensor, max(rows)) for tensor, rows in zip(self.tensors, rows_of, strict=True)]
        pairs = list(zip(padded, rows_of, strict=True))
        sent = [number for number, tensor in enumerate(padded) if tensor.numel()]
        found = [
            padding.new_empty((0 if padding.numel() else sum(rows), *padding.shape[1:])) for padding, rows in pairs
        ]
        if sent:
            payloads = _alone(transport, AllGather(tuple(as_bytes(padded[number].view(-1)) for number in sent)))
            for place, number in enumerate(sent):
                like = padded[number]
                parts = [from_bytes(payload[place], like.dtype).view(like.shape) for payload in payloads]
                found[number] = torch.cat([part[:size] for part, size in zip(parts, rows_of[number], strict=True)])
        return list(zip(found, rows_of, strict=True))


def _alone(transport: Transport, op: CollectiveOp) -> Any:
    def script() -> Generator[CollectiveOp, Any, Any]:
        return (yield op)

    return run_script(script(), transport).result


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """On the CPU, with `rows` rows."""
    own = flat(tensor).view(tensor.shape)
    if len(own) == rows:
        return own
    padded = own.new_zeros((rows, *own.shape[1:]))
    padded[: len(own)] = own
    return padded


@dataclass(frozen=True, kw_only=True, eq=False)
class BroadcastCall(CollectiveCall):
    """Send the tensors of one rank to all. Answer: tensors on the CPU, written over the given ones where these are."""

    kind = "broadcast"
    root: int  # place in the process set

    def form(self) -> list[Any]:
        return [[described(tensor, tensor.shape) for tensor in self.tensors], self.root]

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        vectors = [flat(tensor) for tensor in self.tensors]
        if sent := [as_bytes(vector) for vector in vectors if len(vector)]:
            broadcast(transport, sent, self.root)
        return [vector.view(tensor.shape) for vector, tensor in zip(vectors, self.tensors, strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class BroadcastBytesCall(CollectiveCall):
    """Send a text of bytes of one rank to all; only that rank knows its length. tensors: one of uint8."""

    kind = "broadcast_object"
    root: int

    def form(self) -> list[Any]:
        return [self.root]

    def sizes(self) -> list[int]:
        return [len(self.tensors[0])]

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        (length,) = rank_sizes[self.root]
        here = transport.rank == self.root
        content = self.tensors[0].clone() if here else torch.empty(length, dtype=torch.uint8, device="cpu")
        broadcast(transport, [content], self.root)
        return content


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAllCall(CollectiveCall):
    """Send splits[j] rows of the one tensor to rank j. Answer: the rows received, by rank, and how many of each."""

    kind = "alltoall"
    splits: tuple[int, ...]
    splits_given: bool  # whether the caller passed splits

    def form(self) -> list[Any]:
        return [described(self.tensors[0], self.tensors[0].shape[1:]), self.splits_given]

    def sizes(self) -> list[int]:
        return list(self.splits)

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        """A part has the same size on every sender, so parts are padded to the largest of their receiver."""
        (tensor,) = self.tensors
        rows, trailing = flat(tensor).view(tensor.shape), tensor.shape[1:]
        received = [sizes[transport.rank] for sizes in rank_sizes]
        most = [max(sizes[peer] for sizes in rank_sizes) for peer in range(transport.world)]
        if not max(most) or not prod(trailing):
            return rows.new_empty((sum(received), *trailing)), received
        begins = [0, *accumulate(self.splits)]
        parts = [
            _padded(rows[begin : begin + count], size)
            for begin, count, size in zip(begins, self.splits, most, strict=False)
        ]
        payloads = _alone(transport, AllToAll(tuple((as_bytes(part.reshape(-1)),) for part in parts)))
        shape = (most[transport.rank], *trailing)
        blocks = [part.view(rows.dtype).view(shape) for (part,) in payloads]
        return torch.cat([block[:count] for block, count in zip(blocks, received, strict=True)]), received


def checked_splits(tensor: Tensor, splits: Sequence[int] | None, world: int) -> list[int]:
    """How many rows go to each rank. Raises ValueError for splits that do not fit; None: equally many."""
    if not tensor.dim():
        raise ValueError("alltoall takes a tensor of at least one dimension. Write tensor.reshape(-1).")
    if splits is None:
        if len(tensor) % world:
            raise ValueError(
                f"the first dimension, {len(tensor)}, does not divide by {world} ranks. Pass splits=[...]."
            )
        return [len(tensor) // world] * world
    counts = [int(each) for each in splits]
    if len(counts) != world or min(counts) < 0 or sum(counts) > len(tensor):
        raise ValueError(f"splits must be {world} numbers of rows that add up to at most {len(tensor)}, got {counts}")
    return counts


def row_shares(rows: int, world: int) -> list[int]:
    """How many rows each rank keeps of a reduce-scatter: the first ranks one more where they do not divide."""
    return [rows // world + (rank < rows % world) for rank in range(world)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReduceScatterCall(ReducingCall):
    """Reduce each tensor over the ranks; each rank keeps its rows. Answer: this rank's rows of each tensor."""

    kind = "reducescatter"

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        return [self._rows(tensor, transport) for tensor in self.tensors]

    def _rows(self, tensor: Tensor, transport: Transport) -> Tensor:
        shares = row_shares(len(tensor), transport.world)
        mine = (shares[transport.rank], *tensor.shape[1:])
        vector = flat(tensor)
        if not len(vector):
            return vector.view(0, *tensor.shape[1:]) if not len(tensor) else vector.new_empty(mine)
        parts = vector.split([share * (len(vector) // len(tensor)) for share in shares])
        payloads = _alone(transport, AllToAll(tuple((as_bytes(part),) for part in parts)))
        return combined([part.view(vector.dtype) for (part,) in payloads], self).view(mine)


@dataclass(frozen=True, kw_only=True, eq=False)
class BarrierCall(CollectiveCall):
    """Wait until every rank has made this call."""

    kind = "barrier"

    def form(self) -> list[Any]:
        return []

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class TransportCall(CollectiveCall):
    """An operation of another algorithm, such as a training session's. about: its kind; perform: does it."""

    kind = "session"
    about: str
    perform: Callable[[Transport], Any]

    def form(self) -> list[Any]:
        return [self.about]

    def answer(self, transport: Transport, rank_sizes: Sequence[list[int]]) -> Answer:
        return self.perform(transport)
