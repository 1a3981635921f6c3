"""Collectives: reduce, all-gather, broadcast and barrier of a Lightning strategy, on the group of the open session.

A rank that calls one while another makes a step is told so at once, as with gossamer.gather. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import gather, mean

# As torch.distributed.ReduceOp names them; of tensors of all ranks, stacked
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}
MEANS = {"MEAN", "AVG"}


def all_reduce(tensor: Tensor, reduce_op: object = "mean") -> Tensor:
    """The mean over all ranks, or another of REDUCTIONS; the same bits on every rank. Raises ValueError for others."""
    name = _name_of(reduce_op)
    if name in MEANS:
        return mean(tensor)
    if name not in REDUCTIONS:
        known = ", ".join(each.lower() for each in ("MEAN", *REDUCTIONS))
        raise ValueError(f"reduce_op={reduce_op!r} is none of {known}. Write strategy.reduce(tensor, reduce_op='sum').")
    return REDUCTIONS[name](all_gather(tensor))


def _name_of(reduce_op: object) -> str:
    if isinstance(reduce_op, str):
        return reduce_op.upper()
    names = ("AVG", *REDUCTIONS)
    return next((name for name in names if reduce_op == getattr(dist.ReduceOp, name)), repr(reduce_op))


def all_gather(tensor: Tensor) -> Tensor:
    """All ranks' tensors, stacked by rank: (world, *shape). Raises MismatchError where shapes or dtypes differ."""
    return torch.stack(gather(tensor))


def barrier() -> None:
    """Wait until every rank has come here."""
    gather(True)


def broadcast(value: Any, source: int, *, rank: int) -> Any:
    """The value that rank `source` has: numbers, texts, None, lists and dicts of them, which travel as JSON, so that
    tuples come as lists. Raises TypeError, on every rank, for others."""
    said, error = "", None
    if rank == source:
        try:
            said = json.dumps(value)
        except TypeError as failure:
            error = str(failure)
    found = gather({"said": said, "error": error or ""})[source]
    if found["error"]:
        raise TypeError(
            f"strategy.broadcast sends what JSON can hold, and this cannot be: {found['error']}. Other objects would "
            "have to be unpickled where they arrive. Broadcast what they consist of, and tensors by all_gather."
        )
    return json.loads(found["said"])
