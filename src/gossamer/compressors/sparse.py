"""Few entries travel, with their places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compressors.base import Codec, wide
from gossamer.compressors.dense import Dense
from gossamer.errors import MalformedError, require
from gossamer.kernels import Residual, above, coded_bytes, decode_places, encode_places, largest, sparse_decode
from gossamer.layout import Layout, Packed
from gossamer.words import Aggregation, At, Payload, State

LONGEST = 2**31 - 1  # places are 32-bit integers


def share(density: float, numel: int) -> int:
    """How many of `numel` entries are a fraction `density` of them: at least one, where there is one."""
    return min(numel, max(1, round(density * numel)))


def require_density(density: float, noun: str) -> None:
    require(
        0 < density <= 1,
        f"density is the fraction of entries that travel, in (0, 1], not {density}. "
        f"Write {noun}(density=0.01) for one in a hundred.",
    )


class Sparse(Codec):
    """A codec that takes a known number of entries and sends their values and their places, the latter in few bits."""

    @abstractmethod
    def counts(self, sizes: Sequence[int]) -> list[int]:
        """How many entries travel of tensors of these sizes."""

    @abstractmethod
    def select(self, x: Packed, at: At, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        """(places, values) of what travels: (k,) int32, ascending, and (k,); as `encode` otherwise."""

    def encode(self, x: Packed, at: At, residual: Residual | None = None) -> Payload:
        require_places(x.layout)
        places, values = self.select(x, at, residual)
        return values, encode_places(places, x.layout.numel)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        count = sum(self.counts(layout.sizes))
        for values, _ in payloads:
            expect_values(values, count)
        sparse_decode([(values, coded) for values, coded in payloads], out, divisor)


@dataclass(frozen=True, repr=False)
class TopK(Sparse):
    """Keep the k = density n largest entries of each tensor, at least one; among equals the first ones.

    C(x)_j = x_j if |x_j| is among the k largest, else 0
    law:    |x - C(x)|^2 <= (1 - k/n) |x|^2
    bytes:  (workers - 1) (k itemsize + coded_bytes(k, N)), N of all tensors together: about 2 + log2(N/k) bits a place
    source: Aji & Heafield 2017, EMNLP; Stich et al. 2018, NeurIPS
    """

    density: float
    feedback: bool = True

    def __post_init__(self) -> None:
        require_density(self.density, "TopK")

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def counts(self, sizes: Sequence[int]) -> list[int]:
        return [share(self.density, size) for size in sizes]

    def select(self, x: Packed, at: At, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        return largest(x.flat, x.layout.sizes, self.counts(x.layout.sizes), residual)


@dataclass(frozen=True, repr=False)
class Threshold(Codec):
    """Send the entries beyond +-value, of all tensors together at most the `capacity` N largest.

    C(x)_j = x_j if |x_j| > value and among the r = capacity N largest, else 0
    law:    |x_j - C(x)_j| <= value unless more than r entries pass
    bytes:  (workers - 1) (4 + r itemsize + coded_bytes(r, N)), however few pass; never more than Dense
    source: Strom 2015, Interspeech; Dryden et al. 2016, MLHPC

    Everyone's payload has the same size, so room for r entries travels with the number of those that are used. What
    finds no room waits in the residual. Where so much room would cost more than a mean of everything, that is taken
    instead, and nothing is lost.
    """

    value: float
    capacity: float = 0.05
    feedback: bool = True

    def __post_init__(self) -> None:
        require(
            self.value >= 0, f"value is a magnitude that entries exceed, not {self.value}. Write Threshold(value=0.01)."
        )
        require(
            0 < self.capacity <= 1,
            f"capacity is the fraction of entries that the payload has room for, in (0, 1], not {self.capacity}. "
            "Write Threshold(value=0.01, capacity=0.05) for at most one in twenty.",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def room(self, numel: int) -> int:
        """How many of `numel` entries may travel."""
        return share(self.capacity, numel)

    def encode(self, x: Packed, at: At, residual: Residual | None = None) -> Payload:
        require_places(x.layout)
        room = self.room(x.layout.numel)
        places, values = self._passing(x, room, residual)
        used = torch.tensor([len(places)], dtype=torch.int32, device=x.flat.device)
        return used, pad(values, (0, room - len(values))), encode_places(places, x.layout.numel, room)

    def _passing(self, x: Packed, room: int, residual: Residual | None) -> tuple[Tensor, Tensor]:
        sizes = x.layout.sizes
        found = None if x.flat.is_meta else above(x.flat, sizes, [self.value] * len(sizes), room, residual)
        return largest(x.flat, [x.layout.numel], [room], residual) if found is None else found

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        room = self.room(layout.numel)
        found = [self._used(payload, room, layout.numel) for payload in payloads]
        out.zero_()
        for places, values in found:
            out.index_add_(0, places, values.to(out.dtype) / divisor)

    def _used(self, payload: Payload, room: int, n: int) -> tuple[Tensor, Tensor]:
        """(places, values) of the entries that a payload holds. Raises MalformedError."""
        used, values, coded = payload
        expect_values(values, room)
        if used.dtype != torch.int32 or used.shape != (1,):
            raise MalformedError(f"one int32 that counts entries was due, and {tuple(used.shape)} {used.dtype} came")
        count = room if used.is_meta else int(used)
        return decode_places(coded, count, n, room), values[:count]

    def aggregate(self, x: Packed, state: State, at: At, out: Tensor | None = None) -> Aggregation:
        if self._dearer_than_dense(x, at):
            return Dense().aggregate(x, state, at, out)
        return super().aggregate(x, state, at, out)

    def aggregate_compensated(
        self, x: Packed, residual: Residual, state: State, at: At, out: Tensor | None = None
    ) -> Aggregation:
        if self._dearer_than_dense(x, at):
            return Dense().aggregate_compensated(x, residual, State(), at, out)
        return super().aggregate_compensated(x, residual, state, at, out)

    def _dearer_than_dense(self, x: Packed, at: At) -> bool:
        """Whether everyone's payload would be more bytes than a mean: (world - 1) payload > 2 (world - 1) / world N."""
        room, n, itemsize = self.room(x.layout.numel), x.layout.numel, wide(x.flat.dtype).itemsize
        payload = 4 + room * itemsize + coded_bytes(room, n)
        return at.world > 1 and at.world * payload > 2 * n * itemsize


def require_places(layout: Layout) -> None:
    require(layout.numel <= LONGEST, "places are 32-bit integers: use buckets below 2^31 elements")


def expect_values(values: Tensor, count: int) -> None:
    """Raise MalformedError unless these are `count` real numbers."""
    if values.shape != (count,) or not values.is_floating_point():
        raise MalformedError(f"the values of {count} entries were due, and {tuple(values.shape)} {values.dtype} came")
