"""Collectives: reduce, all-gather, broadcast and barrier of a Lightning strategy, on the group of the open session.

If a rank calls one while another makes a step, an error is raised at once, as by gossamer.gather. Nothing is unpickled.
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
    """Reduce over all ranks by the mean, or another of REDUCTIONS. All ranks get the same bits.

    Raises:
        ValueError: for an unknown reduce_op.
    """
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
    """Stack the tensors of all ranks: (world, *shape). Raises MismatchError if shapes or dtypes differ."""
    return torch.stack(gather(tensor))


def barrier() -> None:
    """Wait until every rank has called it."""
    gather(True)


def broadcast(value: Any, source: int, *, rank: int) -> Any:
    """Send a value of rank `source` to all ranks, as JSON: numbers, strings, None, and lists and dicts of them, with
    strings as keys.

    Tuples arrive as lists. Raises TypeError, on every rank, for other types.
    """
    encoded, error = "", None
    if rank == source:
        try:
            _check_keys(value)
            encoded = json.dumps(value)
        except TypeError as failure:
            error = str(failure)
    found = gather({"said": encoded, "error": error or ""})[source]
    if found["error"]:
        raise TypeError(
            f"strategy.broadcast sends values as JSON, and this value is not serializable: {found['error']}. Other "
            "objects would have to be unpickled by the receiver. Broadcast their fields, and tensors by all_gather."
        )
    return json.loads(found["said"])


def _check_keys(value: Any) -> None:
    """Raise TypeError for keys that JSON would convert to strings."""
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict has the key {strange[0]!r}, which is not a string")
        value = list(value.values())
    for each in value if isinstance(value, list | tuple) else ():
        _check_keys(each)
