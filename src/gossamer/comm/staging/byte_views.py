"""Byte views: a payload as the concatenation of its tensors' bytes, and moves of its parts to and from slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.base.ops import Payload
from gossamer.comm.staging.chunk_tables import spans
from gossamer.comm.staging.staging_area import Move


@dataclass(frozen=True, eq=False)
class ByteViews:
    """views: the bytes of each tensor, uint8 of shape (n,), on its device."""

    views: tuple[Tensor, ...]

    @classmethod
    def of(cls, payload: Payload) -> ByteViews:
        """View tensors as bytes; non-contiguous tensors are copied."""
        return cls(tuple(bytes_of(dense(tensor)) for tensor in payload))

    @property
    def nbytes(self) -> int:
        return sum(view.numel() for view in self.views)

    def length(self, begin: int, end: int) -> int:
        """Number of its bytes in the range [begin, end)."""
        return max(0, min(self.nbytes, end) - begin)

    def moves(self, begin: int, end: int, at: int) -> list[Move]:
        """Moves of the bytes [begin, end), to or from offset `at` of a slot."""
        found: list[Move] = []
        for place, low, high in spans([view.numel() for view in self.views], begin, end):
            found.append((self.views[place][low:high], at))
            at += high - low
        return found


def dense(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with the same elements; the tensor itself if possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 of shape (n,)."""
    return tensor.view(-1).view(torch.uint8)
