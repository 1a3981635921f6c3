"""Operation log: keeps one transaction's results for ranks that did not receive all of them before the mesh broke.

Means, gathered payloads, texts and broadcast tensors are equal on every rank, so any rank can send its results to
another. Those of a neighbor all-gather differ. A gossip round therefore ends with an all-gather, which no rank
completes before all ranks have their neighbors' messages.
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
)
from gossamer.comm.packing import moved

MISSING = object()


class OperationLog:
    """Results in the order in which their operations began.

    Copies are stored in reused memory. Other results are the returned objects, which must not be modified while this
    log may be read (see AllReduceMean).
    """

    def __init__(self) -> None:
        self._answers: list[Any] = []
        self._rooms: dict[tuple[int, ...], Tensor] = {}  # memory of copies, by index

    def clear(self) -> None:
        """Begin another transaction."""
        self._answers = []

    def begin(self) -> int:
        """Return the index of the next operation."""
        self._answers.append(MISSING)
        return len(self._answers) - 1

    @property
    def begun(self) -> int:
        """Number of operations that have begun."""
        return len(self._answers)

    @property
    def answered(self) -> int:
        """Number of leading operations that all have results."""
        return next((place for place, each in enumerate(self._answers) if each is MISSING), len(self._answers))

    def keep(self, place: int, answer: Any) -> None:
        """Keep a result without a copy."""
        self._answers[place] = answer

    def keep_copies(self, place: int, op: CollectiveOp, answer: Any, rank: int) -> None:
        """Keep a result, with copies of the parts that its receiver may modify: in-place means, and this rank's own
        payload."""
        self._answers[place] = self._kept((place,), op, answer, rank)

    def _kept(self, at: tuple[int, ...], op: CollectiveOp, answer: Any, rank: int) -> Any:
        match op:
            case Coalesced(ops):
                pairs = zip(ops, answer, strict=True)
                return [self._kept((*at, number), each, remote, rank) for number, (each, remote) in enumerate(pairs)]
            case AllReduceMean(tensor):
                return self._copy(at, answer) if _shares_memory(answer, tensor) else answer
            case AllGather():
                own = tuple(self._copy((*at, number), tensor) for number, tensor in enumerate(answer[rank]))
                return [own if peer == rank else payload for peer, payload in enumerate(answer)]
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
        """Return the results from an index on, of a completed transaction."""
        return self._answers[place:]


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def handed_out(op: CollectiveOp, answer: Any) -> Any:
    """Convert a result from another rank to that of this rank's operation: means are written to `out`, and payloads are
    moved to the device of its own payload."""
    match op:
        case Coalesced(ops):
            return [handed_out(each, remote) for each, remote in zip(ops, answer, strict=True)]
        case AllReduceMean(tensor, out):
            return (tensor.clone() if out is None else out).copy_(answer)
        case AllGather(payload):
            return [moved(remote, payload) for remote in answer]
        case AllToAll() | NeighborAllGather() | InGroup():
            return answer
        case _:
            assert_never(op)
