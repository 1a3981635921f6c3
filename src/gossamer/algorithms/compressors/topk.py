"""Top-k sparsification: the largest entries and their indices."""

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
from gossamer.errors import MalformedError, RecipeError, require

LONGEST = 2**31 - 1  # indices are 32-bit integers


def share(density: float, numel: int) -> int:
    """Return the number of entries that is a fraction `density` of `numel`: at least 1 unless the tensor is empty."""
    return min(numel, max(1, round(density * numel)))


@lru_cache(maxsize=1024)
def shares(density: float, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return `share` of each size; cached, since sizes are the same at every step."""
    return tuple(share(density, size) for size in sizes)


@lru_cache(maxsize=1024)
def runs(sizes: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """Cut tensors of these sizes into runs of `chunk` entries; the last run of each may be shorter."""
    return tuple(min(chunk, size - start) for size in sizes for start in range(0, size, chunk))


def require_density(density: float, noun: str) -> None:
    require(
        0 < density <= 1,
        f"density must be the fraction of entries to send, in (0, 1], got {density}. "
        f"Write {noun}(density=0.01) for 1 %.",
    )


def densities(final: float) -> tuple[float, ...]:
    """Return the densities of a warm-up above the final one: 1/4, and each stage 1/4 of the one before.

    Lin et al. 2018, ICLR: 25 %, 6.25 %, 1.5625 %, 0.39 %, and then 0.1 %.
    """
    stages: list[float] = []
    while 0.25 ** (len(stages) + 1) > final:
        stages.append(0.25 ** (len(stages) + 1))
    return tuple(stages)


class Sparse(Codec):
    """Base class of codecs that select a known number of entries and send their values and their encoded indices."""

    @abstractmethod
    def denser(self) -> Sequence[Sparse]: ...

    def with_counts(self, counts: tuple[int, ...]) -> Sparse | None:
        return None

    @abstractmethod
    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the number of entries sent of tensors of these sizes."""

    @abstractmethod
    def select(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        """Return (indices, values) of the entries to send: (k,) int32, ascending, and (k,).

        See `encode` for the arguments.
        """

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
    """Send the k = density n largest entries of each tensor, at least one; ties go to the lower index.

    C(x)_j = x_j if |x_j| is among the k largest of its tensor, or with chunk of its run of `chunk` entries, else 0
    law:    |x - C(x)|^2 <= (1 - k/n) |x|^2, per tensor or run
    bytes:  (workers - 1) (k itemsize + coded_bytes(k, N)), N of all tensors together: about 2 + log2(N/k) bits an index
    source: Aji & Heafield 2017, EMNLP; Stich et al. 2018, NeurIPS; chunk: Sarfi et al. 2025, arXiv:2508.15706

    Aji & Heafield call 1 - density the dropping rate R. Stich et al. write k of d entries; their memory m_t is the
    residual that Feedback keeps. Recipes add Feedback.

    With chunk, n counts the entries of a run, and each run sends at least one, so all parts of a large tensor are sent
    equally often. SparseLoCo sends 64 of 4,096: TopK(density=0.015625, chunk=4096). In SparseLoCo a chunk of a matrix
    is a block of 64 x 64 entries and an index takes 12 bits; here it is a run in memory order and an index takes 8.

    Args:
        density: fraction of entries to send, in (0, 1].
        feedback: whether a recipe wraps it in Feedback.
        chunk: entries per run; None selects over the whole tensor.

    Example:
        >>> gossamer.TopK(density=0.01)
        TopK(density=0.01)
    """

    density: float
    feedback: bool = True
    chunk: int | None = None

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
    """Top-k with a separate k for each tensor of one layout, in its order."""

    of_each: tuple[int, ...]

    def denser(self) -> Sequence[LargestEntries]:
        return ()

    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        return self.of_each

    def select(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
        return largest(x.flat, x.layout.sizes, self.of_each, residual)


def entries_bytes(count: int, x: FlatTensors) -> int:
    """Return the bytes of `count` values and their encoded indices."""
    return count * accumulation_dtype(x.flat.dtype).itemsize + coded_bytes(count, x.layout.numel)


def dearer_than_dense(payload_bytes: int, x: FlatTensors, at: AggregationContext) -> bool:
    """Whether all-gathering such a payload costs as much as an all-reduce: (n-1) payload >= 2 (n-1)/n N itemsize."""
    mean_bytes = x.layout.numel * accumulation_dtype(x.flat.dtype).itemsize
    return at.world > 1 and at.world * payload_bytes >= 2 * mean_bytes


def require_places(layout: Layout) -> None:
    """Raise RecipeError for a bucket with more entries than indices can number."""
    if layout.numel > LONGEST:
        raise RecipeError(
            f"a bucket of {layout.numel:,} entries cannot be sparsified: indices are 32-bit integers, for at most "
            f"{LONGEST:,}. Divide its largest parameter into several, or send all entries in few bits, such as Int8()"
        )


def expect_values(values: Tensor, count: int, out: Tensor) -> None:
    """Raise MalformedError unless `values` has `count` elements of the dtype that `out` is accumulated in."""
    dtype = accumulation_dtype(out.dtype)
    if values.shape != (count,) or values.dtype != dtype:
        raise MalformedError(
            f"expected the values of {count} entries in {dtype}, got {tuple(values.shape)} in {values.dtype}"
        )


@lru_cache(maxsize=256)
def chosen(names: tuple[str, ...], counts: tuple[int, ...]) -> Layout:
    """Return the layout of the selected values: `counts[i]` of tensor i, in one dimension."""
    return Layout.of({name: (count,) for name, count in zip(names, counts, strict=True)})
