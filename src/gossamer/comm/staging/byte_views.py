"""Byte views: the bytes of a payload, tensor after tensor in mind, of which parts are moved to and from slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.base.ops import Payload
from gossamer.comm.staging.chunk_tables import spans
from gossamer.comm.staging.staging_area import Move


@dataclass(frozen=True, eq=False)
class ByteViews:
    """views: (n,) of uint8 of each tensor, where it lies."""

    views: tuple[Tensor, ...]

    @classmethod
    def of(cls, payload: Payload) -> ByteViews:
        """Of tensors, or of copies of those that do not lie side by side."""
        return cls(tuple(bytes_of(dense(tensor)) for tensor in payload))

    @property
    def nbytes(self) -> int:
        return sum(view.numel() for view in self.views)

    def length(self, begin: int, end: int) -> int:
        """How many of its bytes are among those from `begin` on until before `end`."""
        return max(0, min(self.nbytes, end) - begin)

    def moves(self, begin: int, end: int, at: int) -> list[Move]:
        """The bytes from `begin` to `end`, which lie at `at` in a slot."""
        found: list[Move] = []
        for place, low, high in spans([view.numel() for view in self.views], begin, end):
            found.append((self.views[place][low:high], at))
            at += high - low
        return found


def dense(tensor: Tensor) -> Tensor:
    """The same numbers, side by side: the tensor itself, where they are."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: Tensor) -> Tensor:
    """(n,) of uint8 of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8)
