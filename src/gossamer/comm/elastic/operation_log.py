"""Operation log: keeps one transaction's answers for ranks whose mesh broke before they had them all.

Means, gathered payloads, texts and broadcast tensors are the same on every rank, so any rank that has them can give
them to any other.
"""

from __future__ import annotations

from typing import Any, assert_never

import torch
from torch import Tensor

from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
)

MISSING = object()


class OperationLog:
    """Answers by the order in which their operations were begun. Copies lie in memory that is used again; other answers
    are those that were handed out, which nobody writes to while this log may be asked (AllReduceMean says so)."""

    def __init__(self) -> None:
        self._answers: list[Any] = []
        self._rooms: dict[tuple[int, ...], Tensor] = {}  # of copies, by their places

    def clear(self) -> None:
        """Another transaction begins."""
        self._answers = []

    def begin(self) -> int:
        """The place of the next operation."""
        self._answers.append(MISSING)
        return len(self._answers) - 1

    @property
    def begun(self) -> int:
        """How many operations have a place."""
        return len(self._answers)

    @property
    def answered(self) -> int:
        """How many of the first operations have all been answered."""
        return next((place for place, each in enumerate(self._answers) if each is MISSING), len(self._answers))

    def keep(self, place: int, answer: Any) -> None:
        """Keep an answer as it is."""
        self._answers[place] = answer

    def keep_copies(self, place: int, op: CollectiveOp, answer: Any, rank: int) -> None:
        """Keep an answer, with copies of what its receiver may write to: means that lie where its input lay, and what
        the rank itself has sent."""
        self._answers[place] = self._kept((place,), op, answer, rank)

    def _kept(self, at: tuple[int, ...], op: CollectiveOp, answer: Any, rank: int) -> Any:
        match op:
            case Coalesced(ops):
                pairs = zip(ops, answer, strict=True)
                return [self._kept((*at, number), each, theirs, rank) for number, (each, theirs) in enumerate(pairs)]
            case AllReduceMean(tensor):
                return self._copy(at, answer) if _shares_memory(answer, tensor) else answer
            case AllGather():
                mine = tuple(self._copy((*at, number), tensor) for number, tensor in enumerate(answer[rank]))
                return [mine if peer == rank else payload for peer, payload in enumerate(answer)]
            case AllToAll() | NeighborAllGather() | InGroup():
                return answer
            case _:
                assert_never(op)

    def _copy(self, at: tuple[int, ...], tensor: Tensor) -> Tensor:
        room = self._rooms.get(at)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype or room.device != tensor.device:
            room = self._rooms[at] = torch.empty_like(tensor)
        return room.copy_(tensor)

    def since(self, place: int) -> list[Any]:
        """The answers from a place on, of a transaction that was completed."""
        return self._answers[place:]


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def handed_out(op: CollectiveOp, answer: Any) -> Any:
    """An answer that another rank has given, as the operation's own: means lie where it asked for them, payloads where
    its own lies."""
    match op:
        case Coalesced(ops):
            return [handed_out(each, theirs) for each, theirs in zip(ops, answer, strict=True)]
        case AllReduceMean(tensor, out):
            return (tensor.clone() if out is None else out).copy_(answer)
        case AllGather(payload):
            return [_beside(theirs, payload) for theirs in answer]
        case AllToAll() | NeighborAllGather() | InGroup():
            return answer
        case _:
            assert_never(op)


def _beside(payload: Payload, like: Payload) -> Payload:
    """A payload that came to this machine's memory, where the operation's tensors are."""
    return tuple(tensor.to(mine.device) for tensor, mine in zip(payload, like, strict=True))
