"""Rotation: the inner compressor receives the coefficients of the tensors in another orthonormal basis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, Decoder, with_mean_in
from gossamer.algorithms.compressors.quantize import is_power_of_two
from gossamer.algorithms.compressors.sharded import Sharded
from gossamer.algorithms.compressors.wrapper import Wrapper
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, dct, hadamard, scratch_for, scratch_like
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.base.layout import FlatTensors, Itself, Layout, Slot, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.errors import require

LARGEST_EDGE = 256  # of a DCT block; the cost grows with it


class Transform(Protocol):
    """Overwrite `out` with the transform of x, or with the inverse transform; return whether the result is finite."""

    def __call__(self, x: Tensor, layout: Layout, block: int, out: Tensor, *, inverse: bool = False) -> bool: ...


@dataclass(frozen=True, repr=False)
class Rotated(Wrapper):
    """Compress the coefficients of each block in another orthonormal basis.

    C(x) = T^-1 inner(T x), T^-1 = T^T in blocks: DCT-II over rows and columns, or H S / sqrt(block), S random signs
    law:    |x - C(x)| = |T x - inner(T x)|: the inner compressor's, for coefficients
    bytes:  the inner compressor's
    source: Peng et al. 2026, ICLR (DCT); Suresh et al. 2017, ICML (random rotation)

    by="hadamard" spreads each entry over its block, so that one large entry does not coarsen the quantization of all
    others. Use it with quantizers whose scale is the largest entry of a block, such as Int8 and TernGrad, and with
    OneBit. It does not help quantizers scaled by the norm, such as QSGD: a rotation keeps the norm, and with few levels
    the error grows. by="dct" concentrates smooth signals in few coefficients. Use it with TopK and similar compressors,
    for tensors whose adjacent entries are correlated.

    Tensors of more than two dimensions are reshaped to (first, rest) in memory order and cut into `block` x `block`
    blocks; those of one dimension into blocks of `block`. The last block may be shorter. (Blocks of the largest divisor
    would leave a dimension of prime length unchanged.) Hadamard blocks are one-dimensional, and the remainder of a
    tensor is cut into powers of two. The signs S are equal on all ranks, in all blocks and at every step, so an inner
    compressor may keep state of coefficients; Feedback around Rotated keeps entries. EDEN draws new signs for each
    sender and step, and is unbiased. OneBit's scale |y|_1 / n, with y = T x, has the least squared error for fixed
    signs, and is biased.

    The DCT is a matrix product, like PowerSGD's: ranks compute the same bits if their processors and thread counts are
    equal. Hadamard sums have the same order everywhere. The rounding error of the transforms in float32, about 1e-7 of
    a block's norm, is in no residual; integers pass unchanged through Hadamard blocks of a power of four.

    Args:
        inner: compressor of the coefficients.
        by: "dct" or "hadamard".
        block: edge of a DCT block, 2 to 256; or entries of a Hadamard block, a power of two.

    Example:
        >>> gossamer.Rotated(gossamer.OneBit(), by="hadamard", block=1024)
        Rotated(OneBit(), by='hadamard', block=1024)
    """

    inner: Compressor
    by: str = "dct"
    block: int = 64

    def __post_init__(self) -> None:
        require(
            self.by in TRANSFORMS,
            f"by must be 'dct' (concentrates smooth signals) or 'hadamard' (spreads large entries), got "
            f"{self.by!r}. Write Rotated(TernGrad(), by='hadamard').",
        )
        require(
            self.by != "dct" or 2 <= self.block <= LARGEST_EDGE,
            f"block must be the edge of a DCT block, from 2 to {LARGEST_EDGE} because the cost per entry grows with "
            f"it, got {self.block}. Write Rotated(TopK(density=0.01), block=64).",
        )
        require(
            self.by != "hadamard" or (is_power_of_two(self.block) and 2 <= self.block <= LARGEST_BLOCK),
            f"block must be the number of entries of a Hadamard block, a power of two from 2 to "
            f"{LARGEST_BLOCK}, got {self.block}. Write Rotated(TernGrad(), by='hadamard', block=1024).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.inner.wants_feedback

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        """Put Feedback around Rotated, if the inner compressor needs it."""
        return complete(self) if self.wants_feedback else replace(self, inner=self.inner.completed(complete))

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        found = self.inner.decoders(layout)
        return None if found is None else [(_TurnedBack(self, decoder), part) for decoder, part in found]

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return self.inner.init(self._blank(like), at)

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        init = self.inner.init if self._shards else self.inner.init_compensated
        return init(self._blank(like), at)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        mean = _room(x, out)
        coefficients = FlatTensors(self.turned(x.flat, x.layout), x.layout)
        staged = yield from self.inner.aggregate(coefficients, state, at, mean)
        return self._result(staged, x.layout, mean, out)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        if self._shards:
            return (yield from super().aggregate_compensated(x, residual, state, at, out))
        mean = _room(x, out)
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        coefficients = FlatTensors(self.turned(wanted, x.layout), x.layout)
        left = residual.after.zero_()  # the coefficients include the residual
        staged = yield from self.inner.aggregate_compensated(coefficients, Residual(left, left), state, at, mean)
        self.turned(left, x.layout, left, inverse=True)
        return self._result(staged, x.layout, mean, out)

    @property
    def _shards(self) -> bool:
        """Whether a worker averages a part of the coefficients. It could not add its residual of that part to one of
        entries, so its errors are a part of its own contribution.
        """
        return any(isinstance(term, Sharded) for term in self.inner.held())

    def turned(self, flat: Tensor, layout: Layout, out: Tensor | None = None, *, inverse: bool = False) -> Tensor:
        """Return the transform of flat: (n,), or its inverse, in `out` or scratch memory, at least float32."""
        found = scratch_like(flat, accumulation_dtype(flat.dtype)) if out is None else out
        if found.dtype != flat.dtype:
            flat = found.copy_(flat)
        TRANSFORMS[self.by](flat, layout, self.block, found, inverse=inverse)
        return found

    def _blank(self, like: FlatTensors) -> FlatTensors:
        return FlatTensors(like.flat.to(accumulation_dtype(like.flat.dtype)), like.layout)

    def _result(self, staged: AggregationResult, layout: Layout, mean: Tensor, out: Tensor | None) -> AggregationResult:
        finite = TRANSFORMS[self.by](staged.mean, layout, self.block, mean, inverse=True)
        owes = staged.owes
        turned = replace(
            staged,
            mean=mean,
            own_contribution=lambda: self.turned(staged.own, layout, inverse=True),
            owes=None if owes is None else lambda: self.turned(owes(), layout, inverse=True),
            finite=staged.finite and finite,
        )
        return with_mean_in(turned, out)


@dataclass(frozen=True)
class _TurnedBack:
    """A decoder that applies the inverse rotation to the decoded coefficients."""

    rotation: Rotated
    decoder: Decoder

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        dtype = accumulation_dtype(out.dtype)
        room = out if out.dtype == dtype else scratch_like(out, dtype)
        self.decoder.decode(payloads, layout, room, divisor)
        self.rotation.turned(room, layout, room, inverse=True)
        if room is not out:
            out.copy_(room)

    def tensors(self, layout: Layout, dtype: torch.dtype) -> int:
        return self.decoder.tensors(layout, accumulation_dtype(dtype))


def _room(x: FlatTensors, out: Tensor | None) -> Tensor:
    """Return the buffer for the mean of coefficients: `out` if precise enough, otherwise scratch memory."""
    dtype = accumulation_dtype(x.flat.dtype)
    if out is not None and out.dtype == dtype:
        return out
    return scratch_for(x.layout.numel, dtype, (x.flat if out is None else out).device)


def _cosines(x: Tensor, layout: Layout, block: int, out: Tensor, *, inverse: bool = False) -> bool:
    return dct(x, _matrices(Itself(layout)), block, out, inverse=inverse)


def _signed_sums(x: Tensor, layout: Layout, block: int, out: Tensor, *, inverse: bool = False) -> bool:
    return hadamard(x, layout.sizes, block, _signs(block, x.dtype, x.device), out, inverse=inverse)


TRANSFORMS: dict[str, Transform] = {"dct": _cosines, "hadamard": _signed_sums}


@lru_cache(maxsize=256)
def _signs(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (block,) of 1 or -1, equal on all ranks."""
    draws = torch.randint(0, 2, (block,), generator=rng.generator("signs of a rotation", block), device="cpu")
    return (2 * draws - 1).to(device=device, dtype=dtype)


@lru_cache(maxsize=256)
def _matrices(layout: Itself[Layout]) -> tuple[tuple[int, int], ...]:
    """Return (rows, cols) of each tensor in memory order; one row for tensors of one dimension."""
    return tuple(_matrix(slot) for slot in layout.item)


def _matrix(slot: Slot) -> tuple[int, int]:
    axes = [axis for axis, size in enumerate(slot.shape) if size != 1]
    if len(axes) < 2 or not slot.numel:
        return 1, slot.numel
    rows = slot.shape[max(axes, key=lambda axis: slot.stride[axis])]
    return rows, slot.numel // rows
