"""Upload: a payload cut into parts of bounded size, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gossamer.core.ops import Payload, payload_bytes
from gossamer.errors import MalformedError

MOST_DIMENSIONS = 8


def cut(payload: Payload, part_bytes: int) -> list[Tensor]:
    """The payload in parts (m,) of at most so many bytes, tensors cut along their elements; none where it is short."""
    if payload_bytes(payload) <= part_bytes:
        return []
    parts: list[Tensor] = []
    for tensor in payload:
        flat = tensor.reshape(-1)
        parts += flat.split(max(part_bytes // flat.element_size(), 1)) if flat.numel() else [flat]
    return parts


def assembled(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Payload:
    """The payload of which these are the parts. Raises MalformedError where they are not."""
    if any(len(shape) > MOST_DIMENSIONS or prod(max(size, 1) for size in shape) > 1 << 60 for shape in shapes):
        raise MalformedError(f"a contribution has tensors of {len(shapes)} shapes, one of which no tensor has")
    found: list[Tensor] = []
    rest = list(parts)
    for shape in shapes:
        pieces, wanted = rest[:1], prod(shape)
        del rest[:1]
        while rest and pieces and sum(each.numel() for each in pieces) < wanted and rest[0].dtype == pieces[0].dtype:
            pieces.append(rest.pop(0))
        if not pieces or sum(each.numel() for each in pieces) != wanted:
            raise MalformedError(f"the parts of a contribution do not make tensors of shapes {[*map(tuple, shapes)]}")
        found.append(torch.cat([piece.reshape(-1) for piece in pieces]).reshape(tuple(shape)))
    if rest:
        raise MalformedError(f"a contribution has {len(rest)} parts more than its tensors need")
    return tuple(found)
