"""Collective operations: the requests of an algorithm to its group, and their properties.

An algorithm is a generator: it yields an operation ("the mean of this tensor over the group") and receives the answer.
It does no communication. Every runner of algorithms (a process group, a simulation, a cost model) only answers
operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from dataclasses import InitVar, dataclass, replace
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.base.former_names import warn_former_name
from gossamer.errors import MalformedError

Payload = tuple[Tensor, ...]
Split = Callable[[Any], list[Any]]


def payload_bytes(payload: Payload | Form) -> int:
    return sum(map(attrgetter("nbytes"), payload))


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Form = tuple[TensorForm, ...]  # of a payload


def payload_form(payload: Payload) -> Form:
    return tuple(TensorForm(tuple(tensor.shape), tensor.dtype) for tensor in payload)


def _without_data(form: Form) -> Payload:
    return tuple(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in form)


class Operation(ABC):
    """A collective operation, with the properties for cost models, recording, coalescing and encoding."""

    name: ClassVar[str]  # in the output of explain and in records

    @abstractmethod
    def tensors(self) -> Payload:
        """Return the tensors that this rank sends, in order."""

    @abstractmethod
    def map(self, f: Callable[[Tensor], Any]) -> Self:
        """Return the same operation on f of each tensor, without `out`."""

    @abstractmethod
    def bytes_sent(self, world: int, rank: int = 0) -> float:
        """Return the payload bytes that one of `world` workers sends for it, without headers."""

    def mean_bytes_sent(self, world: int) -> float:
        """Return `bytes_sent` on average over the workers."""
        return self.bytes_sent(world)

    @abstractmethod
    def meta_answer(self, world: int, rank: int) -> Any:
        """Return an answer of the right shapes, assuming that every rank sends the same shapes unless the operation has
        their forms."""

    @abstractmethod
    def answer_alone(self, receive: Callable[[Payload], Payload]) -> Any:
        """Return the answer in a group of one, which receives `receive(payload)` for each payload that it sends."""

    @abstractmethod
    def coalescing_key(self) -> tuple[Hashable, ...]:
        """Return a key; operations with equal keys can be joined."""

    @abstractmethod
    def join(self, ops: Sequence[Any]) -> tuple[CollectiveOp, Split]:
        """Return one operation for all of `ops`, of which this is the first, and a function that splits its answer."""

    @property
    def label(self) -> str:
        """Its name in a list of costs."""
        return self.name

    def names(self) -> set[str]:
        """Return the names of all operations in it."""
        return {self.name}

    def concurrent(self) -> Iterator[CollectiveOp]:
        """Return its concurrent operations."""
        yield self  # type: ignore[misc]

    def sources(self, world: int) -> Collection[int]:
        """Return the ranks with a part in its answer, which must have begun before it is complete."""
        return range(world)

    def within(self, ranks: tuple[int, ...]) -> CollectiveOp:
        """Return the same operation within the sub-group `ranks` of a larger group."""
        return InGroup(ranks, self)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AllReduceMean(Operation):
    """All-reduce: the elementwise mean of `tensor` over the group, in the tensor's shape and dtype.

    Half-precision tensors are sent as they are, summed in float32 and rounded once (NCCL sums them its own way). An
    answer that is not written over `tensor` may also be passed to other ranks, so its reader must not modify it before
    the next exchange; `tensor` must not be modified before the answer arrives.

    Args:
        tensor: this rank's input, with the same shape and dtype on every rank.
        out: receives the answer, if given; may be `tensor` itself.

    Example:
        >>> gossamer.extend.AllReduceMean(torch.zeros(1000)).bytes_sent(world=4)
        6000.0
    """

    name: ClassVar[str] = "Mean"

    tensor: Tensor
    out: Tensor | None = None

    def tensors(self) -> Payload:
        return (self.tensor,)

    def map(self, f: Callable[[Tensor], Any]) -> Self:
        return replace(self, tensor=f(self.tensor), out=None)

    def bytes_sent(self, world: int, rank: int = 0) -> float:
        """Return the bytes of a reduce-scatter and an all-gather, averaged over the workers: 2 (n-1)/n of the tensor's
        bytes.
        """
        return 2 * (world - 1) * self.tensor.nbytes / world

    def meta_answer(self, world: int, rank: int) -> Tensor:
        return self.tensor if self.out is None else self.out

    def answer_alone(self, receive: Callable[[Payload], Payload]) -> Tensor:
        due, (received,) = self.tensor, receive((self.tensor,))
        if received.shape != due.shape or received.dtype != due.dtype:
            raise MalformedError(
                f"expected {tuple(due.shape)} numbers of {due.dtype}, got {tuple(received.shape)} of {received.dtype}"
            )
        if self.out is None:
            return received.clone()
        return received if self.out.is_meta and not received.is_meta else self.out.copy_(received)

    def coalescing_key(self) -> tuple[Hashable, ...]:
        return AllReduceMean, self.tensor.dtype, self.tensor.device

    def join(self, ops: Sequence[AllReduceMean]) -> tuple[CollectiveOp, Split]:
        sizes = [op.tensor.numel() for op in ops]
        flat = torch.cat([op.tensor.reshape(-1) for op in ops])

        def split(answer: Tensor) -> list[Any]:
            parts = [part.view(op.tensor.shape) for op, part in zip(ops, answer.split(sizes), strict=True)]
            return [part if op.out is None else op.out.copy_(part) for op, part in zip(ops, parts, strict=True)]

        return AllReduceMean(flat, out=flat), split


@dataclass(frozen=True)
class AllGather(Operation):
    """All-gather: each rank's `payload`, by rank.

    Args:
        payload: tensors, with the same shapes and dtypes on every rank unless `forms` is given.
        forms: the shapes and dtypes of each rank's payload, by rank, if they differ; equal on every rank.

    Example:
        >>> gossamer.extend.AllGather((torch.zeros(1000),)).bytes_sent(world=4)
        12000.0
    """

    name: ClassVar[str] = "Gather"

    payload: Payload
    forms: tuple[Form, ...] | None = None

    def tensors(self) -> Payload:
        return self.payload

    def map(self, f: Callable[[Tensor], Any]) -> Self:
        return replace(self, payload=tuple(f(tensor) for tensor in self.payload))

    def bytes_sent(self, world: int, rank: int = 0) -> float:
        return float((world - 1) * payload_bytes(self.payload if self.forms is None else self.forms[rank]))

    def mean_bytes_sent(self, world: int) -> float:
        return self.bytes_sent(world) if self.forms is None else _mean_bytes(self.forms)

    def meta_answer(self, world: int, rank: int) -> list[Payload]:
        return [self.payload] * world if self.forms is None else list(map(_without_data, self.forms))

    def answer_alone(self, receive: Callable[[Payload], Payload]) -> list[Payload]:
        return [receive(self.payload)]

    def coalescing_key(self) -> tuple[Hashable, ...]:
        return AllGather, self.forms is None, _devices(self.payload)

    def join(self, ops: Sequence[AllGather]) -> tuple[CollectiveOp, Split]:
        joint, split = _join_payloads(ops)
        if self.forms is None:
            return joint, split
        forms = [op.forms or () for op in ops]
        return replace(joint, forms=_added(forms)), _splitting_unequal(forms)


@dataclass(frozen=True)
class AllToAll(Operation):
    """All-to-all: send `parts[j]` to rank j; the answer has the parts that each rank sent to this one, by rank.

    Args:
        parts: a payload for each rank. Those for rank j have the same shapes and dtypes on every sender unless `forms`
            is given.
        forms: the shapes and dtypes of the part that each rank sends to this one, by rank, if they differ between
            senders. All parts of one sender must then have the same number of bytes.

    Example:
        >>> gossamer.extend.AllToAll(((torch.zeros(10),), (torch.zeros(10),))).bytes_sent(world=2, rank=0)
        40.0
    """

    name: ClassVar[str] = "Exchange"

    parts: tuple[Payload, ...]
    forms: tuple[Form, ...] | None = None

    def tensors(self) -> Payload:
        return tuple(tensor for part in self.parts for tensor in part)

    def map(self, f: Callable[[Tensor], Any]) -> Self:
        return replace(self, parts=tuple(tuple(f(tensor) for tensor in part) for part in self.parts))

    def bytes_sent(self, world: int, rank: int = 0) -> float:
        if self.forms is not None:
            return float((world - 1) * payload_bytes(self.forms[rank]))
        return float(sum(payload_bytes(part) for peer, part in enumerate(self.parts) if peer != rank))

    def mean_bytes_sent(self, world: int) -> float:
        return self.bytes_sent(world) if self.forms is None else _mean_bytes(self.forms)

    def meta_answer(self, world: int, rank: int) -> list[Payload]:
        return [self.parts[rank]] * world if self.forms is None else list(map(_without_data, self.forms))

    def answer_alone(self, receive: Callable[[Payload], Payload]) -> list[Payload]:
        return [receive(part) for part in self.parts]

    def coalescing_key(self) -> tuple[Hashable, ...]:
        return AllToAll, self.forms is None, _devices(self.parts[0])

    def join(self, ops: Sequence[AllToAll]) -> tuple[CollectiveOp, Split]:
        parts = tuple(sum((op.parts[peer] for op in ops), ()) for peer in range(len(self.parts)))
        if self.forms is None:
            return AllToAll(parts), _splitting([len(op.parts[0]) for op in ops])
        forms = [op.forms or () for op in ops]
        return AllToAll(parts, _added(forms)), _splitting_unequal(forms)


@dataclass(frozen=True)
class NeighborAllGather(Operation):
    """Neighbor all-gather: send `payload` to each of `receivers`, receive one from each peer in `edges`, in that order.

    Send and receive lists must match: i sends to j exactly if j receives from i. A rank may receive from itself.

    Args:
        payload: tensors, with the same shapes and dtypes on every rank.
        edges: (peer, weight) of the peers to receive from. The weights are for the caller; a transport uses the peers
            only.
        sends_to: the peers to send to; None: the same peers.
        `tells`: the former name of `sends_to`.

    Example:
        >>> op = gossamer.extend.NeighborAllGather((torch.zeros(10),), edges=((1, 0.5), (3, 0.5)))
        >>> op.receivers, op.bytes_sent(world=4, rank=0)
        ((1, 3), 80.0)
    """

    name: ClassVar[str] = "Mix"

    payload: Payload
    edges: tuple[tuple[int, float], ...]
    sends_to: tuple[int, ...] | None = None
    tells: InitVar[tuple[int, ...] | None] = None

    def __post_init__(self, tells: tuple[int, ...] | None) -> None:
        if tells is not None:
            warn_former_name("NeighborAllGather(tells=...)", "NeighborAllGather(sends_to=...)", stacklevel=2)
            object.__setattr__(self, "sends_to", tells)

    @property
    def senders(self) -> tuple[int, ...]:
        return tuple(peer for peer, _ in self.edges)

    @property
    def receivers(self) -> tuple[int, ...]:
        """The peers that the payload is sent to."""
        return self.senders if self.sends_to is None else self.sends_to

    def sources(self, world: int) -> Collection[int]:
        return self.senders

    def tensors(self) -> Payload:
        return self.payload

    def map(self, f: Callable[[Tensor], Any]) -> Self:
        return replace(self, payload=tuple(f(tensor) for tensor in self.payload))

    def bytes_sent(self, world: int, rank: int = 0) -> float:
        return float(sum(peer != rank for peer in self.receivers) * payload_bytes(self.payload))

    def meta_answer(self, world: int, rank: int) -> list[Payload]:
        return [self.payload] * len(self.edges)

    def answer_alone(self, receive: Callable[[Payload], Payload]) -> list[Payload]:
        return [receive(self.payload)]

    def coalescing_key(self) -> tuple[Hashable, ...]:
        return NeighborAllGather, self.edges, self.sends_to, _devices(self.payload)

    def join(self, ops: Sequence[NeighborAllGather]) -> tuple[CollectiveOp, Split]:
        return _join_payloads(ops)


SimpleOp = AllReduceMean | AllGather | AllToAll | NeighborAllGather  # an operation of one group


@dataclass(frozen=True)
class InGroup(Operation):
    """Run `op` within a sub-group, in which ranks are indices into `ranks`.

    Collective over the whole group: every rank requests an InGroup at the same point, with disjoint sub-groups, and
    each sub-group may request a different operation.

    Args:
        ranks: the sub-group, ascending, including this rank.
        op: the operation of the sub-group.

    Example:
        >>> op = gossamer.extend.InGroup((0, 1), gossamer.extend.AllReduceMean(torch.zeros(10)))
        >>> op.bytes_sent(world=8, rank=0)
        40.0
    """

    name: ClassVar[str] = "Among"

    ranks: tuple[int, ...]
    op: SimpleOp

    def group_of(self, rank: int, world: int) -> tuple[int, ...]:
        """Return the sub-group of `rank`, assuming regular sub-groups: blocks of adjacent ranks, or every k-th rank.

        The rank alone, if no such group is left for it.
        """
        if rank in self.ranks:
            return self.ranks
        step = self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1
        reach = step * len(self.ranks)
        first = rank // reach * reach + rank % step
        group = tuple(range(first, first + reach, step))
        return group if group[-1] < world and not set(group) & set(self.ranks) else (rank,)

    def tensors(self) -> Payload:
        return self.op.tensors()

    def map(self, f: Callable[[Tensor], Any]) -> Self:
        return replace(self, op=self.op.map(f))

    def bytes_sent(self, world: int, rank: int = 0) -> float:
        return self.op.bytes_sent(len(self.ranks), self.ranks.index(rank))

    def meta_answer(self, world: int, rank: int) -> Any:
        return self.op.meta_answer(len(self.ranks), self.ranks.index(rank))

    def answer_alone(self, receive: Callable[[Payload], Payload]) -> Any:
        return self.op.answer_alone(receive)

    def coalescing_key(self) -> tuple[Hashable, ...]:
        return InGroup, self.ranks, *self.op.coalescing_key()

    def join(self, ops: Sequence[InGroup]) -> tuple[CollectiveOp, Split]:
        inner: list[Any] = [each.op for each in ops]
        joint, split = self.op.join(inner)
        return replace(self, op=joint), split  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        return f"{self.op.name} among {len(self.ranks)}"

    def sources(self, world: int) -> Collection[int]:
        return [self.ranks[place] for place in self.op.sources(len(self.ranks))]

    def names(self) -> set[str]:
        return {self.name, self.op.name}

    def within(self, ranks: tuple[int, ...]) -> CollectiveOp:
        return InGroup(tuple(ranks[place] for place in self.ranks), self.op)


@dataclass(frozen=True)
class Coalesced(Operation):
    """Several concurrent operations; the answers are in the same order.

    Args:
        ops: the operations, which must not depend on each other.

    Example:
        >>> op = gossamer.extend.AllReduceMean(torch.zeros(10))
        >>> gossamer.extend.Coalesced((op, op)).bytes_sent(world=2)
        80.0
    """

    name: ClassVar[str] = "Together"

    ops: tuple[SimpleOp | InGroup, ...]

    def tensors(self) -> Payload:
        return tuple(tensor for op in self.ops for tensor in op.tensors())

    def map(self, f: Callable[[Tensor], Any]) -> Self:
        return replace(self, ops=tuple(op.map(f) for op in self.ops))

    def bytes_sent(self, world: int, rank: int = 0) -> float:
        return sum(op.bytes_sent(world, rank) for op in self.ops)

    def mean_bytes_sent(self, world: int) -> float:
        return sum(op.mean_bytes_sent(world) for op in self.ops)

    def meta_answer(self, world: int, rank: int) -> list[Any]:
        return [op.meta_answer(world, rank) for op in self.ops]

    def answer_alone(self, receive: Callable[[Payload], Payload]) -> list[Any]:
        return [op.answer_alone(receive) for op in self.ops]

    def coalescing_key(self) -> tuple[Hashable, ...]:
        return (Coalesced,)

    def join(self, ops: Sequence[Coalesced]) -> tuple[CollectiveOp, Split]:
        counts = [len(op.ops) for op in ops]

        def split(answer: list[Any]) -> list[Any]:
            return [answer[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]

        return Coalesced(tuple(each for op in ops for each in op.ops)), split

    def concurrent(self) -> Iterator[CollectiveOp]:
        for op in self.ops:
            yield from op.concurrent()

    def sources(self, world: int) -> Collection[int]:
        return {rank for op in self.ops for rank in op.sources(world)}

    def names(self) -> set[str]:
        return {name for op in self.ops for name in op.names()}

    def within(self, ranks: tuple[int, ...]) -> CollectiveOp:
        return Coalesced(tuple(op.within(ranks) for op in self.ops))  # type: ignore[misc]


CollectiveOp = SimpleOp | InGroup | Coalesced
Script = Generator[CollectiveOp, Any, Any]


def in_group(ranks: tuple[int, ...], script: Script) -> Script:
    """Run the script of a group within the sub-group `ranks` of a larger one."""
    answer: Any = None
    while True:
        try:
            op = script.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield op.within(ranks)


CoalescedScript = Generator[CollectiveOp, Any, list[Any]]


def coalesce(scripts: Sequence[Script]) -> CoalescedScript:
    """Advance many scripts together; returns their results in order.

    Two hundred small tensors then cost as many messages as one, and different kinds of operations do not wait for each
    other. An operation that is alone of its kind in a round travels as it is, without a copy.
    """
    results: list[Any] = [None] * len(scripts)
    replies: dict[int, Any] = dict.fromkeys(range(len(scripts)))  # by script; a script is started with None
    while True:
        groups: dict[tuple[Hashable, ...], tuple[list[int], list[Any]]] = {}  # scripts and their operations, by kind
        for place in sorted(replies):
            try:
                op = scripts[place].send(replies.pop(place))  # drops the last reference to an answer
            except StopIteration as stop:
                results[place] = stop.value
            else:
                places, ops = groups.setdefault(op.coalescing_key(), ([], []))
                places.append(place)
                ops.append(op)
        if not groups:
            return results
        joint: list[Any] = []
        splits: list[Split | None] = []
        for _, ops in groups.values():
            op, split = ops[0].join(ops) if len(ops) > 1 else (ops[0], None)
            joint.append(op)
            splits.append(split)
        answers = [(yield joint[0])] if len(joint) == 1 else (yield Coalesced(tuple(joint)))
        for (places, _), split, answer in zip(groups.values(), splits, answers, strict=True):
            for place, part in zip(places, [answer] if split is None else split(answer), strict=True):
                replies[place] = part
        del answers, answer, part


def _devices(payload: Payload) -> frozenset[torch.device]:
    return frozenset(map(attrgetter("device"), payload))


def _mean_bytes(forms: Sequence[Form]) -> float:
    """The bytes that a rank sends to all others, on average."""
    return (len(forms) - 1) * sum(map(payload_bytes, forms)) / len(forms)


def _added(forms: Sequence[tuple[Form, ...]]) -> tuple[Form, ...]:
    """The forms of joined payloads, by rank."""
    return tuple(sum(same, ()) for same in zip(*forms, strict=True))


def _splitting_unequal(forms: Sequence[tuple[Form, ...]]) -> Split:
    """As `_splitting`, with other numbers of tensors for each rank."""
    splits = [_splitting([len(form) for form in same]) for same in zip(*forms, strict=True)]

    def split(received: Sequence[Payload]) -> list[Any]:
        by_rank = [each([payload]) for each, payload in zip(splits, received, strict=True)]
        return [[part for (part,) in same] for same in zip(*by_rank, strict=True)]

    return split


def _join_payloads(ops: Sequence[AllGather] | Sequence[NeighborAllGather]) -> tuple[Any, Split]:
    payload = tuple(tensor for op in ops for tensor in op.payload)
    return replace(ops[0], payload=payload), _splitting([len(op.payload) for op in ops])


def _splitting(counts: Sequence[int]) -> Split:
    """Return a function that splits joined payloads, `counts` tensors each."""
    ends = list(accumulate(counts))

    def split(received: Sequence[Payload]) -> list[Any]:
        return [[payload[end - count : end] for payload in received] for count, end in zip(counts, ends, strict=True)]

    return split
