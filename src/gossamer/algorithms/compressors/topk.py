"""Top-k: the largest entries, with their places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from gossamer.algorithms.compressors.base import Codec
from gossamer.algorithms.compressors.decoding import pairs
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, coded_bytes, encode_places, largest, sparse_decode
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError, require

LONGEST = 2**31 - 1  # places are 32-bit integers


def share(density: float, numel: int) -> int:
    """How many of `numel` entries are a fraction `density` of them: at least one, where there is one."""
    return min(numel, max(1, round(density * numel)))


@lru_cache(maxsize=1024)
def shares(density: float, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The share of each of these sizes, which are the same at every step: counted once."""
    return tuple(share(density, size) for size in sizes)


@lru_cache(maxsize=1024)
def runs(sizes: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """Cut tensors of these sizes into runs of `chunk` entries; the last run of each may be shorter."""
    return tuple(min(chunk, size - start) for size in sizes for start in range(0, size, chunk))


def require_density(density: float, noun: str) -> None:
    require(
        0 < density <= 1,
        f"density is the fraction of entries that travel, in (0, 1], not {density}. "
        f"Write {noun}(density=0.01) for one in a hundred.",
    )


def densities(final: float) -> tuple[float, ...]:
    """The densities above the final one through which a warm-up falls: a quarter of all, and a quarter of the last one.

    Lin et al. 2018, ICLR: 25 %, 6.25 %, 1.5625 %, 0.39 %, and then 0.1 %.
    """
    stages: list[float] = []
    while 0.25 ** (len(stages) + 1) > final:
        stages.append(0.25 ** (len(stages) + 1))
    return tuple(stages)


class Sparse(Codec):
    """A codec that takes a known number of entries and sends their values and their places, the latter in few bits."""

    @abstractmethod
    def denser(self) -> Sequence[Sparse]: ...

    def with_counts(self, counts: tuple[int, ...]) -> Sparse | None:
        return None

    @abstractmethod
    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        """How many entries travel of tensors of these sizes."""

    @abstractmethod
    def select(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        """(places, values) of what travels: (k,) int32, ascending, and (k,); as `encode` otherwise."""

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        require_places(x.layout)
        places, values = self.select(x, at, residual)
        return values, encode_places(places, x.layout.numel)

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        count = sum(self.counts(layout.sizes))
        for values, _ in pairs(payloads):
            expect_values(values, count, out)
        sparse_decode(pairs(payloads), out, divisor)


@dataclass(frozen=True, repr=False)
class TopK(Sparse):
    """Keep the k = density n largest entries of each tensor, at least one; among equals the first ones.

    C(x)_j = x_j if |x_j| is among the k largest of its tensor, or with chunk of its run of `chunk` entries, else 0
    law:    |x - C(x)|^2 <= (1 - k/n) |x|^2, per tensor or run
    bytes:  (workers - 1) (k itemsize + coded_bytes(k, N)), N of all tensors together: about 2 + log2(N/k) bits a place
    source: Aji & Heafield 2017, EMNLP; Stich et al. 2018, NeurIPS; chunk: Sarfi et al. 2025, arXiv:2508.15706

    With chunk, n counts the entries of a run, and each run sends at least one. Each part of a large tensor is then sent
    as often as the others. SparseLoCo keeps 64 of 4,096: TopK(density=0.015625, chunk=4096). There, a chunk of a matrix
    is a square of 64 x 64 entries and a place takes 12 bits; here it is a run in memory order and a place takes 8.
    """

    density: float
    feedback: bool = True
    chunk: int | None = None  # entries per run; None: a tensor is not cut

    def __post_init__(self) -> None:
        require_density(self.density, "TopK")
        require(
            self.chunk is None or self.chunk >= 1,
            f"chunk must be a number of entries, 1 or more, got {self.chunk}. "
            f"Write TopK(density={self.density}, chunk=4096).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def denser(self) -> Sequence[TopK]:
        return [replace(self, density=density) for density in densities(self.density)]

    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        if self.chunk is None:
            return shares(self.density, tuple(sizes))
        each = share(self.density, self.chunk)
        return [size // self.chunk * each + share(self.density, size % self.chunk) for size in sizes]

    def with_counts(self, counts: tuple[int, ...]) -> LargestEntries | None:
        return LargestEntries(counts) if self.chunk is None else None

    def select(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        sizes = x.layout.sizes if self.chunk is None else runs(tuple(x.layout.sizes), self.chunk)
        return largest(x.flat, sizes, shares(self.density, tuple(sizes)), residual)


@dataclass(frozen=True, repr=False)
class LargestEntries(Sparse):
    """Keep so many of the largest entries of each tensor of one layout, in its order: top-k whose k differ."""

    of_each: tuple[int, ...]

    def denser(self) -> Sequence[LargestEntries]:
        return ()

    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        return self.of_each

    def select(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        return largest(x.flat, x.layout.sizes, self.of_each, residual)


def entries_bytes(count: int, x: FlatTensors) -> int:
    """What so many values and their places take."""
    return count * accumulation_dtype(x.flat.dtype).itemsize + coded_bytes(count, x.layout.numel)


def dearer_than_dense(payload_bytes: int, x: FlatTensors, at: AggregationContext) -> bool:
    """Whether such a payload for all ranks costs as much as a mean: (n-1) payload >= 2 (n-1)/n N itemsize."""
    mean_bytes = x.layout.numel * accumulation_dtype(x.flat.dtype).itemsize
    return at.world > 1 and at.world * payload_bytes >= 2 * mean_bytes


def require_places(layout: Layout) -> None:
    require(layout.numel <= LONGEST, "places are 32-bit integers: use buckets below 2^31 elements")


def expect_values(values: Tensor, count: int, out: Tensor) -> None:
    """Raise MalformedError unless these are `count` numbers such as are added up into `out`."""
    dtype = accumulation_dtype(out.dtype)
    if values.shape != (count,) or values.dtype != dtype:
        raise MalformedError(
            f"the values of {count} entries in {dtype} were due, and {tuple(values.shape)} {values.dtype} came"
        )


@lru_cache(maxsize=256)
def chosen(names: tuple[str, ...], counts: tuple[int, ...]) -> Layout:
    """The layout of so many values of each tensor, in one dimension."""
    return Layout.of({name: (count,) for name, count in zip(names, counts, strict=True)})
