"""Value transfer: sends texts and tensors from ranks that have them to ranks that do not, over one group."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.base.json_text import read_json
from gossamer.base.layout import dtype_name
from gossamer.comm.elastic.change import Group
from gossamer.errors import MalformedError

MOST_TENSORS, MOST_ENTRIES = 2**20, 2**48


def broadcast_value(group: Group, source: int, value: Any) -> Any:
    """Broadcast the value of rank `source`."""
    tensors: list[Tensor] = []
    text = json.dumps(_described(value, tensors)) if group.rank == source else ""
    text = group.all_gather_text(text)[source]
    if group.rank != source:
        tensors = _blank(text)
    if tensors:
        group.broadcast_(tensors, source)
    return value if group.rank == source else _built(json.loads(text), tensors)


def hand_over_value(group: Group, donors: Sequence[int], receivers: Sequence[int], value: Any) -> Any:
    """Send a value that all `donors` have to the `receivers`; each donor sends a part of its bytes."""
    tensors: list[Tensor] = []
    donates, receives = group.rank in donors, group.rank in receivers
    text = json.dumps(_described(value, tensors)) if donates else ""
    text = group.all_gather_text(text if group.rank == donors[0] else "")[donors[0]]
    if receives:
        tensors = _blank(text)
    sizes = [tensor.nbytes for tensor in tensors]
    ends = list(accumulate(sizes, initial=0))
    cuts = [ends[-1] * place // len(donors) for place in range(len(donors) + 1)]
    parts = {donor: (cuts[place], cuts[place + 1]) for place, donor in enumerate(donors)}
    if not receives:
        begin, end = parts[group.rank] if donates else (0, 0)
        group.deliver(dict.fromkeys(receivers, _bytes(tensors, ends, begin, end)) if begin < end else {}, {})
        return value
    received = group.deliver({}, {donor: end - begin for donor, (begin, end) in parts.items() if end > begin})
    for donor, joint in received.items():
        _fill(tensors, ends, parts[donor][0], joint)
    return _built(json.loads(text), tensors)


def _pieces(tensors: Sequence[Tensor], ends: Sequence[int], begin: int, end: int) -> Collection[Tensor]:
    """Views of the bytes [begin, end) of the concatenation of tensors."""
    found: list[Tensor] = []
    for tensor, start, stop in zip(tensors, ends, ends[1:], strict=False):
        low, high = max(begin, start), min(end, stop)
        if low < high:
            found.append(tensor.view(-1).view(torch.uint8)[low - start : high - start])
    return found


def _bytes(tensors: Sequence[Tensor], ends: Sequence[int], begin: int, end: int) -> Tensor:
    dense = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    pieces = list(_pieces(dense, ends, begin, end))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _fill(tensors: Sequence[Tensor], ends: Sequence[int], begin: int, joint: Tensor) -> None:
    for piece, remote in zip(
        (pieces := list(_pieces(tensors, ends, begin, begin + len(joint)))),
        joint.split([len(piece) for piece in pieces]),
        strict=True,
    ):
        piece.copy_(remote)


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Encode a value as JSON. Its tensors are appended to `tensors`, and encoded as their index."""
    match value:
        case Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1, "shape": list(value.shape), "dtype": dtype_name(value.dtype)}
        case tuple():
            return {"tuple": [_described(each, tensors) for each in value]}
        case list():
            return [_described(each, tensors) for each in value]
        case str() | None:
            return value
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be transferred")


def _blank(text: str) -> list[Tensor]:
    """Allocate the tensors that a text describes. Raises MalformedError before allocating if it is invalid."""
    found: dict[int, tuple[list[int], torch.dtype]] = {}

    def walk(described: Any) -> None:
        match described:
            case {"tensor": int(place), "shape": list(shape), "dtype": str(dtype)}:
                kind = getattr(torch, dtype.removeprefix("torch."), None)
                sized = (
                    all(type(each) is int and 0 <= each < MOST_ENTRIES for each in shape) and prod(shape) < MOST_ENTRIES
                )
                if len(found) >= MOST_TENSORS or not sized or not isinstance(kind, torch.dtype):
                    raise MalformedError(f"invalid tensor in another rank's state: {shape!s:.80} of {dtype:.20}")
                found[place] = shape, kind
            case list(parts) | {"tuple": list(parts)}:
                for each in parts:
                    walk(each)
            case str() | None:
                pass
            case _:
                raise MalformedError("another rank's state is invalid")

    try:
        walk(read_json(text))
    except ValueError as error:
        raise MalformedError(f"another rank's state is not valid JSON: {error!s:.100}") from None
    if sorted(found) != list(range(len(found))):
        raise MalformedError("the tensors in another rank's state are not numbered from 0")
    forms = [found[place] for place in range(len(found))]
    return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in forms]


def _built(described: Any, tensors: Sequence[Tensor]) -> Any:
    match described:
        case {"tensor": int(place)}:
            return tensors[place]
        case {"tuple": list(parts)}:
            return tuple(_built(each, tensors) for each in parts)
        case list(parts):
            return [_built(each, tensors) for each in parts]
    return described
