"""Few entries travel, with their places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.compressors.base import Codec, wide
from gossamer.compressors.dense import Dense
from gossamer.core.aggregation import Aggregation, At, State
from gossamer.core.layout import Layout, Packed
from gossamer.core.ops import Payload
from gossamer.errors import MalformedError, require
from gossamer.kernels import (
    Residual,
    above,
    coded_bytes,
    decode_places,
    encode_places,
    largest,
    scatter,
    sparse_decode,
)

LONGEST = 2**31 - 1  # places are 32-bit integers


def share(density: float, numel: int) -> int:
    """How many of `numel` entries are a fraction `density` of them: at least one, where there is one."""
    return min(numel, max(1, round(density * numel)))


@lru_cache(maxsize=1024)
def shares(density: float, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The share of each of these sizes, which are the same at every step: counted once."""
    return tuple(share(density, size) for size in sizes)


def require_density(density: float, noun: str) -> None:
    require(
        0 < density <= 1,
        f"density is the fraction of entries that travel, in (0, 1], not {density}. "
        f"Write {noun}(density=0.01) for one in a hundred.",
    )


class Sparse(Codec):
    """A codec that takes a known number of entries and sends their values and their places, the latter in few bits."""

    @abstractmethod
    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
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

    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        return shares(self.density, tuple(sizes))

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
    finds no room waits in the residual. Where so much room would cost as much as a mean of everything, that is taken
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
        places, values = above(x.flat, self.value, room, residual)
        used = torch.tensor([len(places)], dtype=torch.int32, device=x.flat.device)
        return used, values, encode_places(places, x.layout.numel, room)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        room = self.room(layout.numel)
        scatter([self._used(payload, room, layout.numel) for payload in payloads], out, divisor)

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
        return dearer_than_dense(4 + entries_bytes(self.room(x.layout.numel), x), x, at)


def entries_bytes(count: int, x: Packed) -> int:
    """What so many values and their places take."""
    return count * wide(x.flat.dtype).itemsize + coded_bytes(count, x.layout.numel)


def dearer_than_dense(payload_bytes: int, x: Packed, at: At) -> bool:
    """Whether such a payload for everyone costs as much as a mean: (n-1) payload >= 2 (n-1)/n N itemsize."""
    mean_bytes = x.layout.numel * wide(x.flat.dtype).itemsize
    return at.world > 1 and at.world * payload_bytes >= 2 * mean_bytes


def require_places(layout: Layout) -> None:
    require(layout.numel <= LONGEST, "places are 32-bit integers: use buckets below 2^31 elements")


def expect_values(values: Tensor, count: int) -> None:
    """Raise MalformedError unless these are `count` real numbers."""
    if values.shape != (count,) or not values.is_floating_point():
        raise MalformedError(f"the values of {count} entries were due, and {tuple(values.shape)} {values.dtype} came")


@lru_cache(maxsize=256)
def chosen(names: tuple[str, ...], counts: tuple[int, ...]) -> Layout:
    """The layout of so many values of each tensor, in one dimension."""
    return Layout.of({name: (count,) for name, count in zip(names, counts, strict=True)})
