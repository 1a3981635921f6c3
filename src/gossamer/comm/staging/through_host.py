"""Through host: an operation's tensors are copied here, it is performed here, and its answer is copied back.

For engines that take no tensors of a device, such as Gloo beside a GPU. Each copy is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, NeighborAllGather, Payload

SimpleOp = AllReduceMean | AllGather | AllToAll | NeighborAllGather
Begin = Callable[[Any], Callable[[], Any]]


def through_host(op: SimpleOp, begin: Begin, place: int) -> Callable[[], Any]:
    """Begin an operation by `begin`, which sees this machine's memory only. place: of this rank in its group."""
    wait = begin(op.map(Tensor.cpu))
    return lambda: _beside(op, wait(), place)


def _beside(op: SimpleOp, answer: Any, place: int) -> Any:
    match op:
        case AllReduceMean(tensor, out):
            return answer.to(tensor.device) if out is None else out.copy_(answer)
        case AllToAll(parts):
            like = parts[place]
        case _:
            like = op.tensors()
    return [_moved(payload, like) for payload in answer]


def _moved(payload: Payload, like: Payload) -> Payload:
    return tuple(tensor.to(theirs.device) for tensor, theirs in zip(payload, like, strict=True))
