"""Upload: a payload cut into parts of bounded size, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gossamer.base.ops import Payload, payload_bytes
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
    end = 0
    for shape in shapes:
        begin, count, wanted = end, 0, prod(shape)
        while end < len(parts) and (end == begin or count < wanted) and parts[end].dtype == parts[begin].dtype:
            count += parts[end].numel()
            end += 1
        if end == begin or count != wanted:
            shown = [*map(tuple, shapes[:10])]
            raise MalformedError(f"the parts of a contribution do not make tensors of shapes {shown}")
        found.append(torch.cat([piece.reshape(-1) for piece in parts[begin:end]]).reshape(tuple(shape)))
    if end < len(parts):
        raise MalformedError(f"a contribution has {len(parts) - end} parts more than its tensors need")
    return tuple(found)
